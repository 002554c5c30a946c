"""Two reports beside each other. Pure; knows no file and no screen."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvrelay.gaps import CAUSES

LATENCIES = (("TTFT", "ttft_ms"), ("TBT", "tbt_ms"), ("TBT of a stream", "stream_tbt_ms"))


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity of two recordings; None where one has none. change: of b against a, 0.5 is half as much again."""

    name: str
    unit: str
    a: float | None
    b: float | None

    @property
    def difference(self) -> float | None:
        return None if self.a is None or self.b is None else round(self.b - self.a, 5)

    @property
    def change(self) -> float | None:
        return None if self.a is None or self.b is None or not self.a else round(self.b / self.a - 1.0, 4)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "difference": self.difference, "change": self.change}


def compare(a: dict[str, Any], b: dict[str, Any]) -> list[Row]:
    """What was recorded, latencies, and what each cause costs in a gap: the numbers of gaps need not be the same."""
    rows = [Row(name, "", a[name], b[name]) for name in ("requests", "tokens", "gaps", "steps")]
    for name, key in LATENCIES:
        rows += _percentiles(name, a["overall"][key], b["overall"][key])
    for cause in CAUSES:
        each = (a["causes"]["ms_per_gap"][cause.value], b["causes"]["ms_per_gap"][cause.value])
        rows.append(Row(cause.value, "ms a gap", *each))
    for cause in CAUSES:
        shares = (a["slowest"]["shares"][cause.value], b["slowest"]["shares"][cause.value])
        rows.append(Row(f"{cause.value}, slowest 1 %", "share", *shares))
    return [row for row in rows if row.a or row.b]


def _percentiles(name: str, a: dict[str, float] | None, b: dict[str, float] | None) -> list[Row]:
    keys = a or b or {}
    return [Row(f"{name} {key}", "ms", (a or {}).get(key), (b or {}).get(key)) for key in keys]
