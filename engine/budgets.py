"""What a step may hold. Knows nothing of what is in it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Budgets:
    """The difference between a prefill and a decode worker is a difference of budgets.

    max_tokens bounds all rows of a step, max_sequences the sequences admitted at a time, max_prefill_tokens (None: no
    bound) the rows of prompts in a step that decodes too.
    """

    max_tokens: int = 512
    max_sequences: int = 256
    max_prefill_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_sequences", "max_prefill_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
