"""OTLP JSON as an exporter writes it, made by hand: spans of requests, decode segments and step records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

ACCEPTED_NS = 1_800_000_000_000_000_000
PHASES = ("schedule_s", "build_s", "forward_s", "sample_s", "send_s")
COUNTS = ("batch", "prefill_tokens", "num_tokens", "blocks_used", "transfers", "preemptions", "swapped_blocks")


def any_value(value: object) -> dict[str, Any]:
    """An AnyValue: integers as strings, as the JSON encoding of protobuf has them."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, str):
        return {"stringValue": value}
    assert isinstance(value, Sequence)
    return {"arrayValue": {"values": [any_value(item) for item in value]}}


def span(
    name: str,
    attributes: Mapping[str, object],
    span_id: str,
    parent_id: str = "",
    trace_id: str = "t" * 32,
    start_s: float = 0.0,
    end_s: float = 0.0,
) -> dict[str, Any]:
    """Seconds count from ACCEPTED_NS."""
    return {
        "traceId": trace_id,
        "spanId": span_id,
        **({"parentSpanId": parent_id} if parent_id else {}),
        "name": name,
        "startTimeUnixNano": str(ACCEPTED_NS + round(start_s * 1e9)),
        "endTimeUnixNano": str(ACCEPTED_NS + round(end_s * 1e9)),
        "attributes": [{"key": key, "value": any_value(value)} for key, value in attributes.items()],
    }


def line(*spans: Mapping[str, Any]) -> str:
    """One export request, with its line end."""
    document = {"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {"name": "kvrelay"}, "spans": spans}]}]}
    return json.dumps(document, separators=(",", ":")) + "\n"


def root(request_id: str, span_id: str, accepted_s: float = 0.0, **more: object) -> dict[str, Any]:
    attributes = {
        "kvrelay.request.id": request_id,
        "kvrelay.request.outcome": "length",
        "kvrelay.request.accepted_s": accepted_s,
    }
    return span("kvrelay.v1.InferenceService/Generate", {**attributes, **more}, span_id, trace_id=trace_of(span_id))


def trace_of(root_id: str) -> str:
    return root_id.rjust(32, "0")


def piece(
    name: str, root_id: str, start_s: float, end_s: float, worker: str = "", attempt: int = 0, **more: object
) -> dict[str, Any]:
    attributes = {"kvrelay.attempt": attempt, **({"kvrelay.worker.id": worker} if worker else {}), **more}
    own = f"{root_id}-{name}-{attempt}-{start_s}"
    return span(name, attributes, own, root_id, trace_of(root_id), start_s, end_s)


def decode(
    root_id: str,
    offsets_s: Sequence[float],
    step_ids: Sequence[int],
    *,
    worker: str = "decode-0",
    incarnation: str = "i0",
    sent_s: Sequence[float] | None = None,
    batch: Sequence[int] | None = None,
    first_index: int = 0,
    attempt: int = 0,
    sequence: int | None = None,
) -> dict[str, Any]:
    attributes: dict[str, object] = {
        "kvrelay.attempt": attempt,
        "kvrelay.decode.first_index": first_index,
        "kvrelay.decode.token_offsets_s": list(offsets_s),
        "kvrelay.decode.step_ids": list(step_ids),
        "kvrelay.decode.batch": list(batch if batch is not None else [1] * len(offsets_s)),
        "kvrelay.decode.sent_s": list(sent_s if sent_s is not None else offsets_s),
        "kvrelay.worker.id": worker,
        "kvrelay.worker.incarnation": incarnation,
    }
    if sequence is not None:
        attributes["kvrelay.sequence"] = sequence
    own = f"{root_id}-decode-{sequence}-{attempt}-{first_index}"
    ends = offsets_s[-1] if offsets_s else 0.0
    return span("decode", attributes, own, root_id, trace_of(root_id), offsets_s[0] if offsets_s else 0.0, ends)


def steps(
    records: Sequence[Mapping[str, float]],
    *,
    worker: str = "decode-0",
    incarnation: str = "i0",
    role: str = "decode",
    clock_offset_s: float = 0.0,
    first_id: int = 1,
) -> dict[str, Any]:
    """A span of step records; each says start_s and what is not 0 of it."""
    ids = [int(record.get("step_id", first_id + index)) for index, record in enumerate(records)]
    attributes: dict[str, object] = {
        "kvrelay.worker.id": worker,
        "kvrelay.worker.incarnation": incarnation,
        "kvrelay.worker.role": role,
        "kvrelay.clock.offset_s": clock_offset_s,
        "kvrelay.clock.error_s": 0.0001,
        "kvrelay.steps.ids": ids,
        "kvrelay.steps.start_s": [float(record["start_s"]) for record in records],
    }
    for phase in PHASES:
        attributes[f"kvrelay.steps.{phase}"] = [float(record.get(phase, 0.0)) for record in records]
    for count in COUNTS:
        attributes[f"kvrelay.steps.{count}"] = [int(record.get(count, 0)) for record in records]
    return span("worker.steps", attributes, f"steps-{worker}-{incarnation}-{ids[0]}", trace_id=f"steps-{worker}")
