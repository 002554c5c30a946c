"""A model that says what a script tells it: for tests of stop strings, UTF-8 and ends. Writes the hash model's KV."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from engine.hash_executor import HashExecutor
from engine.memory import HostPool
from engine.plan import Plan, Result
from kvrelay.blocks import KVLayout
from kvrelay.requests import Sampling

if TYPE_CHECKING:
    from engine.sampler import Masks

LEAD = 20.0
"""Of the logit of the script's token over the next: drawn at temperature 1 unless penalties and biases outweigh it."""


class ScriptedExecutor:
    """Executor whose token of output index i is script[i], for every sequence; EOS where the script says nothing.

    The script is a list of tokens from index 0, or a mapping of indexes to tokens. KV bytes are those of HashExecutor,
    so that hand-offs move real bytes. So are the logits of draws that need some, but for the script's token, which is
    by far the best.
    """

    def __init__(
        self,
        num_blocks: int,
        script: Mapping[int, int] | Sequence[int],
        block_size: int = 16,
        vocab_size: int = 258,
        eos_token_id: int = 257,
        step_seconds: float = 0.0,
        pause: Callable[[float], None] | None = None,
        swap_blocks: int = 0,
        grammars: Masks | None = None,
        token_seconds: float = 0.0,
    ) -> None:
        self._script = dict(script) if isinstance(script, Mapping) else dict(enumerate(script))
        for index, token_id in self._script.items():
            if index < 0:
                raise ValueError(f"script has a token for index {index}, the first is 0")
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"script[{index}] is token {token_id}, not in a vocabulary of {vocab_size}")
        self._kv = HashExecutor(
            num_blocks, block_size, vocab_size, eos_token_id, step_seconds, pause, swap_blocks, grammars, token_seconds
        )
        self.vocab_size = vocab_size
        self.eos_token_id = eos_token_id

    @property
    def layout(self) -> KVLayout:
        return self._kv.layout

    @property
    def pool(self) -> HostPool:
        return self._kv.pool

    @property
    def swap(self) -> HostPool | None:
        return self._kv.swap

    def run(self, plan: Plan) -> Result:
        """KV as the hash model writes it, tokens from the script."""
        return self._kv.run_saying(plan, self._says, LEAD)

    def close(self) -> None:
        self._kv.close()

    def _says(self, prefix: hashlib.blake2b, sampling: Sampling, index: int) -> int:
        return self._script.get(index, self.eos_token_id)
