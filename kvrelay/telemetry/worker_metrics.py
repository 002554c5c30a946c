"""Metrics made of a worker's load: the same where the worker tells them itself and where a coordinator does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric

from kvrelay.session import Load
from kvrelay.telemetry import names
from kvrelay.telemetry.metrics import Labels, counter, gauge

STATES = ("free", "held", "cached", "reserved", "quarantined")


def load_metrics(loads: Sequence[tuple[Labels, Load]]) -> Iterator[Metric]:
    """One row for each worker; every counter of it as an event of that name."""
    blocks = [(labels | {"state": s}, float(getattr(load.blocks, s))) for labels, load in loads for s in STATES]
    yield gauge(names.PROM_BLOCKS, "KV blocks by state.", blocks)
    yield gauge(names.PROM_BATCH, "Sequences in the batch.", [(w, load.running) for w, load in loads])
    yield gauge(names.PROM_WAITING, "Sequences that wait.", [(w, load.waiting) for w, load in loads])
    yield gauge(names.PROM_QUEUED_TOKENS, "Tokens yet to be computed.", [(w, load.queued_tokens) for w, load in loads])
    yield gauge(names.PROM_TRANSFERS, "Hand-offs under way.", [(w, load.transfers_in_flight) for w, load in loads])
    yield gauge(names.PROM_TOKEN_RATE, "Tokens per second.", [(w, load.tokens_per_s) for w, load in loads])
    events = [(labels | {"event": name}, float(n)) for labels, load in loads for name, n in load.counters]
    yield counter(names.PROM_COUNTS, "What happened, by name.", events)
