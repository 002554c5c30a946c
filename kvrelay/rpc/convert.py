"""The door to all conversions between protos and the vocabulary. Knows no wire: the modules it names do the work."""

from __future__ import annotations

from kvrelay.rpc.command_convert import CommandAssembler, command_to_protos
from kvrelay.rpc.description_convert import (
    description_from_proto,
    description_to_proto,
    load_from_proto,
    load_to_proto,
    model_from_proto,
    model_to_proto,
)
from kvrelay.rpc.link_convert import (
    to_decode_from_proto,
    to_decode_to_proto,
    to_prefill_from_proto,
    to_prefill_to_proto,
)
from kvrelay.rpc.report_convert import report_from_proto, report_to_protos

__all__ = [
    "CommandAssembler",
    "command_to_protos",
    "description_from_proto",
    "description_to_proto",
    "load_from_proto",
    "load_to_proto",
    "model_from_proto",
    "model_to_proto",
    "report_from_proto",
    "report_to_protos",
    "to_decode_from_proto",
    "to_decode_to_proto",
    "to_prefill_from_proto",
    "to_prefill_to_proto",
]
