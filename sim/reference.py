"""What one process without a cache gives for a request: the answers every stream is held against. Knows no cluster."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.text import ByteCodec
from engine.block_pool import BlockPool
from engine.budgets import Budgets
from engine.events import Sampled
from engine.hash_executor import HashExecutor
from engine.local import LocalEngine
from engine.scheduler import Scheduler
from kvrelay.models.builtin import BUILTIN_EOS, BUILTIN_VOCAB
from kvrelay.requests import FinishReason, Logprobs, RequestId, SequenceKey, SequenceSpec, SessionId
from sim.coordinator_node import Ask
from sim.shapes import BLOCK_SIZE, grammars


@dataclass(frozen=True)
class Answer:
    token_ids: tuple[int, ...]
    text: str
    reason: FinishReason
    logprobs: tuple[Logprobs | None, ...] = ()
    """Of each token."""


class OneProcess:
    """One engine, reused for every request."""

    def __init__(self, num_blocks: int) -> None:
        self._executor = HashExecutor(num_blocks, BLOCK_SIZE, BUILTIN_VOCAB, BUILTIN_EOS, grammars=grammars())
        self._engine = LocalEngine(self._executor, Scheduler(BlockPool(num_blocks), BLOCK_SIZE, Budgets()))
        self._codec = ByteCodec()

    def answers(self, ask: Ask) -> tuple[Answer, ...]:
        """One for each of its n sequences, as if each had been asked for alone."""
        specs = [self._spec(ask, sequence) for sequence in range(ask.n)]
        drawn: dict[SequenceKey, list[Sampled]] = {spec.key: [] for spec in specs}
        for event in self._engine.stream(specs):
            if isinstance(event, Sampled):
                drawn[event.key].append(event)
        return tuple(self._answer(ask, drawn[spec.key]) for spec in specs)

    @staticmethod
    def _spec(ask: Ask, sequence: int) -> SequenceSpec:
        key = SequenceKey(SessionId("one"), RequestId(ask.name), 1, sequence)
        return SequenceSpec(
            key, ask.prompt_ids, len(ask.prompt_ids), ask.sampling.of_sequence(sequence), ask.stop, prefix_cache=False
        )

    def _answer(self, ask: Ask, drawn: list[Sampled]) -> Answer:
        tokens, logprobs = tuple(e.token_id for e in drawn), tuple(e.logprobs for e in drawn)
        (text,) = ask.texts(self._codec, 1)
        pieces = []
        for i, token in enumerate(tokens):
            piece, hit = text.push(token)
            pieces.append(piece)
            if hit:
                return Answer(tokens[: i + 1], "".join(pieces), FinishReason.STOP, logprobs)
        reason = ask.stop.finish_of(len(tokens) - 1, tokens[-1])
        assert reason is not None
        return Answer(tokens, "".join(pieces) + text.finish(), reason, logprobs)

    def close(self) -> None:
        self._executor.close()
