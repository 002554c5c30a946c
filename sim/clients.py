"""Clients of the simulated cluster: each asks once, checks every message as it comes, and keeps its history.

Some leave in the middle, some read slowly, some ask again with what they were told. What a client may see is decided
here: of each sequence the right tokens, each index once and in order, then one finish; or one status of a kind that its
circumstances explain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.stream import FinishItem, TokenItem
from kvrelay.errors import KVRelayError
from sim.coordinator_node import Ask
from sim.network import End, Network
from sim.reference import Answer
from sim.world import Node, Violation, World


@dataclass
class Seen:
    """What came of one sequence."""

    num_tokens: int = 0
    text: list[str] = field(default_factory=list)
    finish: FinishItem | None = None


@dataclass
class History:
    """What one client saw. answers: of each sequence. leave_at, leave_after_s: tokens of all sequences or time after
    which it leaves, None to stay."""

    ask: Ask
    answers: tuple[Answer, ...]
    leave_at: int | None = None
    leave_after_s: float | None = None
    read_pause_s: float = 0.0
    started_at: float = 0.0
    ended_at: float | None = None
    seen: list[Seen] = field(default_factory=list)
    error: KVRelayError | None = None
    left: bool = False

    def __post_init__(self) -> None:
        self.seen = [Seen() for _ in self.answers]

    @property
    def num_tokens(self) -> int:
        return sum(seen.num_tokens for seen in self.seen)

    @property
    def outcome(self) -> str:
        if self.left:
            return "left"
        if all(seen.finish is not None for seen in self.seen):
            return "exact"
        return type(self.error).__name__ if self.error is not None else "open"


class Clients:
    """All clients on one node that never dies."""

    def __init__(
        self,
        world: World,
        net: Network,
        coordinators: list[str],
        judge_error: Callable[[History, KVRelayError], None],
    ) -> None:
        self.judge_error = judge_error
        self.world, self.net, self.coordinators = world, net, coordinators
        self.node = Node(world, "clients")
        self.histories: list[History] = []
        self.num_open = 0
        """Streams that have not ended, or not begun."""
        self.cached_tokens = 0
        """Prompt tokens that finished streams were told to come from a cache."""

    def add(self, history: History, at: float) -> None:
        """Starts it at that time, or soon after the one has ended that it comes after."""
        self.histories.append(history)
        self.num_open += 1
        if not history.ask.after:
            self.world.at(at, lambda: self._start(history))

    def _start(self, history: History) -> None:
        history.started_at = self.world.now
        self.node.spawn(self._ask(history), history.ask.name)

    async def _ask(self, history: History) -> None:
        try:
            address = self.world.rng.choice(self.coordinators)
            end = await self.net.connect(self.node, address, "generate")
            try:
                await end.write(history.ask)
                async with asyncio.timeout(history.leave_after_s):
                    await self._read(history, end)
            except TimeoutError:
                history.left = True
            finally:
                end.close()
        except KVRelayError as error:
            history.error = error
            try:
                self.judge_error(history, error)
            except Violation as violation:
                self.node.loop.call_exception_handler({"message": "a client", "exception": violation})
        except Exception as error:
            self.node.loop.call_exception_handler({"message": f"client {history.ask.name}", "exception": error})
        history.ended_at = self.world.now
        self.num_open -= 1
        self.world.trace("client", f"{history.ask.name} ends: {history.outcome} {history.error or ''}")
        for next_one in self.histories:
            if next_one.ask.after == history.ask.name:
                pause = self.world.rng.choice((0.0, 0.0, 0.01, 0.3))
                self.world.after(pause, lambda history=next_one: self._start(history))  # type: ignore[misc]

    async def _read(self, history: History, end: End) -> None:
        while True:
            item = await end.read()
            if isinstance(item, TokenItem):
                self._token(history, item)
                if history.leave_at is not None and history.num_tokens >= history.leave_at:
                    history.left = True
                    return
                if history.read_pause_s:
                    await asyncio.sleep(history.read_pause_s)
            elif isinstance(item, FinishItem):
                self._finish(history, item)
                if all(seen.finish is not None for seen in history.seen):
                    if await end.read() is not None:
                        raise Violation(f"{history.ask.name}: something comes after the finish")
                    return
            else:
                raise Violation(f"{history.ask.name}: the stream ended without a finish or a status")

    def _token(self, history: History, item: TokenItem) -> None:
        name, seen = f"{history.ask.name}.{item.sequence}", history.seen[item.sequence]
        expected, at = history.answers[item.sequence].token_ids, seen.num_tokens
        if seen.finish is not None:
            raise Violation(f"{name}: a token comes after the finish")
        if item.index != at:
            raise Violation(f"{name}: index {item.index} after {at} tokens")
        if at >= len(expected) or item.token_id != expected[at]:
            right = expected[at] if at < len(expected) else "none"
            raise Violation(f"{name}: token {at} is {item.token_id}, must be {right}")
        said = history.answers[item.sequence].logprobs[at]
        if item.logprobs != said:
            raise Violation(f"{name}: token {at} came with {item.logprobs}, must be with {said}")
        seen.num_tokens += 1
        seen.text.append(item.text)

    def _finish(self, history: History, item: FinishItem) -> None:
        ask, answer, before = history.ask, history.answers[item.sequence], history.seen[item.sequence]
        if before.finish is not None:
            raise Violation(f"{ask.name}.{item.sequence}: ends twice")
        before.finish = item
        seen = (before.num_tokens, item.completion_tokens, item.reason, "".join(before.text) + item.text)
        right = (len(answer.token_ids), len(answer.token_ids), answer.reason, answer.text)
        if seen != right:
            raise Violation(f"{ask.name}.{item.sequence}: ended as {seen}, must be {right}")
        most = len(ask.prompt_ids) - 1 if ask.prefix_cache else 0
        if not 0 <= item.cached_tokens <= most:
            raise Violation(f"{ask.name}: {item.cached_tokens} cached tokens, at most {most} can be")
        self.cached_tokens += item.cached_tokens if item.sequence == 0 else 0
