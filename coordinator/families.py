"""The n sequences of one request as the dispatcher keeps them, and under which names workers speak of them.

Knows what is open; knows no lifecycle and no workers.
"""

from __future__ import annotations

from dataclasses import replace

from coordinator.events import ForkArrived
from coordinator.forks import child_of, expects_firsts
from coordinator.live import Live
from coordinator.output import OutputText
from kvrelay.requests import RequestId, WorkerId
from kvrelay.session import TokenOut


def first_token(live: Live, worker: WorkerId, token: TokenOut) -> ForkArrived | None:
    """Keeps one of the n first tokens with the attempt; says all of them with the last one, None before it.

    A worker says them in one report, but a long one comes in frames that may be cut between them.
    """
    n = live.facts.n
    if token.index or token.sequence >= n or not expects_firsts(live.state, worker, token.attempt):
        return None
    found = live.attempt.first_tokens
    found[token.sequence] = token
    if len(found) < n:
        return None
    return ForkArrived(worker, token.attempt, tuple(found[s].token_id for s in range(n)))


class Families:
    """requests: the open ones, by the id that each has of its own."""

    def __init__(self, requests: dict[RequestId, Live]) -> None:
        self._requests = requests
        self._children: dict[RequestId, tuple[Live, ...]] = {}

    def found(self, prompt: Live) -> tuple[Live, ...]:
        """The n sequences of a request that forks, in their order; they share its stream and its past."""
        texts = (prompt.text, *prompt.more_texts)
        children = tuple(_child(prompt, sequence, text) for sequence, text in enumerate(texts))
        assert len(children) == prompt.facts.n, "a text for each sequence"
        self._requests.update((child.id, child) for child in children)
        prompt.children = self._children[prompt.id] = children
        return children

    def child(self, request_id: RequestId, attempt: int, sequence: int) -> Live | None:
        """The open sequence that workers still know by this name."""
        children = self._children.get(request_id, ())
        if sequence >= len(children):
            return None
        child = children[sequence]
        return child if self._is_under(child, attempt) else None

    def under(self, request_id: RequestId, attempt: int) -> list[Live]:
        """The open sequences that workers still know as parts of this attempt."""
        return [child for child in self._children.get(request_id, ()) if self._is_under(child, attempt)]

    def of(self, request_id: RequestId) -> list[Live]:
        """Its sequences that are still open, wherever they are."""
        return [child for child in self._children.get(request_id, ()) if child.id in self._requests]

    def part(self, request_id: RequestId) -> None:
        """Forgets the family."""
        self._children.pop(request_id, None)

    def _is_under(self, child: Live, attempt: int) -> bool:
        fork = child.state.fork
        return fork is not None and fork.attempt == attempt and child.id in self._requests


def _child(prompt: Live, sequence: int, text: OutputText) -> Live:
    return Live(
        child_of(prompt.state, sequence),
        prompt.order + sequence,
        text,
        prompt.stream,
        replace(prompt.times),
        replace(prompt.attempt),
        lost=list(prompt.lost),
        cached_tokens=prompt.cached_tokens,
        sequence=sequence,
        parent=prompt,
    )
