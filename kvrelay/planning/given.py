"""What a plan starts from: a machine's figures, a load, what is set. Values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """One worker's figures: bytes of memory, bytes it reads a second, operations a second, bytes its network moves."""

    memory_bytes: int
    bytes_per_s: float
    flops_per_s: float
    network_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """Requests a second, each with so many tokens in and out."""

    prompt_tokens: int
    output_tokens: int
    rate: float

    @property
    def mean_tokens(self) -> float:
        """Of a request while it decodes: its prompt and half of its answer."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True)
class Terms:
    """What is set for a plan. max_sequences: of a batch. tbt_s: the longest step wanted, 0: any.

    long_prompt: the one that is cut into chunks; 0: as long as the model's positions go.
    """

    dtype: str = "bfloat16"
    usable: float = 0.9
    reserve_bytes: int = 2 * 10**9
    block_size: int = 16
    step_tokens: int = 2048
    max_sequences: int = 256
    decode_sequences: int = 32
    long_prompt: int = 0
    efficiency: float = 0.5
    tbt_s: float = 0.0
