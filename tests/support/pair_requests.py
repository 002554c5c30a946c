"""Requests for a pair of cores, what one process says to them, and what a coordinator knows of each."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from engine.block_pool import BlockPool
from engine.budgets import Budgets
from engine.events import Sampled
from engine.hash_executor import HashExecutor
from engine.local import LocalEngine
from engine.sampler import Masks
from engine.scheduler import Scheduler
from kvrelay.blocks import Ticket
from kvrelay.requests import Logprobs, RequestId, Sampling, SequenceKey, SequenceSpec, SessionId, StopRule
from kvrelay.session import ComputeRecord, Ended, Pushed, Refused, TokenOut, Work

SESSION = SessionId("s-1")
VOCAB = 258


def hash_draws(work: Work, sequence: int = 0, grammars: Masks | None = None) -> list[tuple[int, Logprobs | None]]:
    """The tokens of the one-process path, and what it says of each."""
    executor = HashExecutor(512, 16, VOCAB, grammars=grammars)
    engine = LocalEngine(executor, Scheduler(BlockPool(512), 16, Budgets()))
    key = SequenceKey(SESSION, work.request_id, work.attempt)
    spec = SequenceSpec(key, work.token_ids, work.num_prompt_tokens, work.sampling.of_sequence(sequence), work.stop)
    try:
        events = [event for event in engine.stream([spec]) if isinstance(event, Sampled)]
    finally:
        executor.close()
    assert [event.index for event in events] == list(range(spec.first_index, spec.first_index + len(events)))
    return [(event.token_id, event.logprobs) for event in events]


def hash_reference(work: Work, sequence: int = 0) -> tuple[int, ...]:
    """The tokens alone."""
    return tuple(token for token, _ in hash_draws(work, sequence))


def hash_references(work: Work) -> list[tuple[int, ...]]:
    """The same of each of its n sequences."""
    return [hash_reference(work, sequence) for sequence in range(work.n)]


def make_work(name: str, num_tokens: int, max_tokens: int, seed: int | None = None) -> Work:
    rng = random.Random(f"{name}-{num_tokens}")
    tokens = tuple(rng.randrange(256) for _ in range(num_tokens))
    sampling = Sampling(temperature=0.0) if seed is None else Sampling(temperature=1.0, seed=seed)
    return Work(RequestId(name), 1, tokens, num_tokens, sampling, StopRule(max_tokens))


def work_of(name: str, tokens: tuple[int, ...], max_tokens: int = 20) -> Work:
    """A greedy request with these tokens."""
    return replace(make_work(name, 1, max_tokens), token_ids=tokens, num_prompt_tokens=len(tokens))


@dataclass
class Request:
    """said[s]: tokens of sequence s, and logprobs[s] what came with them. endings: of each Ended, which sequence and
    why, in order.
    """

    work: Work
    local: bool = False
    said: list[list[int]] = field(default_factory=list)
    logprobs: list[list[Logprobs | None]] = field(default_factory=list)
    ticket: Ticket | None = None
    started: bool = False
    ended: Ended | None = None
    endings: list[tuple[int, str]] = field(default_factory=list)
    refused: Refused | None = None
    landed: bool = False
    pushed: Pushed | None = None
    records: list[ComputeRecord] = field(default_factory=list)
    aborted: bool = False
    dropped: set[int] = field(default_factory=set)
    """Sequences given up one by one."""

    def __post_init__(self) -> None:
        self.said = [[] for _ in range(self.work.n)]
        self.logprobs = [[] for _ in range(self.work.n)]

    @property
    def tokens(self) -> list[int]:
        """Of sequence 0."""
        return self.said[0]

    @property
    def num_cached_tokens(self) -> int:
        """Of the one record that there must be."""
        (record,) = self.records
        return record.num_cached_tokens

    def is_over(self, sequence: int) -> bool:
        """Whether its last token ends it, or it was given up."""
        said, stop = self.said[sequence], self.work.stop
        index = self.work.first_index + len(said) - 1
        return sequence in self.dropped or (bool(said) and stop.finish_of(index, said[-1]) is not None)

    @property
    def is_done(self) -> bool:
        return bool(self.ended or self.refused or self.aborted or self.is_given_up)

    @property
    def is_given_up(self) -> bool:
        """No Ended is to come: the sequence that was left was given up."""
        return bool(self.dropped) and all(map(self.is_over, range(self.work.n)))

    def token(self, out: TokenOut) -> None:
        said = self.said[out.sequence]
        index = self.work.first_index + len(said)
        assert out.index == index, f"index {out.index} after {len(said)} tokens of sequence {out.sequence}"
        said.append(out.token_id)
        self.logprobs[out.sequence].append(out.logprobs)

    def end(self, ended: Ended) -> None:
        """The request has ended with the Ended of its last sequence, or with the first failure."""
        self.endings.append((ended.sequence, ended.reason))
        if ended.reason == "failed" or all(map(self.is_over, range(self.work.n))):
            self.ended = ended
