"""What a check says: how bad it is, what is so, what to do about it. Knows no check."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


class Verdict(enum.StrEnum):
    """From good to bad."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's. advice: what to do, "" where there is nothing. figures: what was measured."""

    check: str
    verdict: Verdict
    what: str
    advice: str = ""
    figures: Mapping[str, object] = field(default_factory=dict)


def worst(findings: Iterable[Finding]) -> Verdict:
    """OK for none at all."""
    order = list(Verdict)
    return max((f.verdict for f in findings), key=order.index, default=Verdict.OK)
