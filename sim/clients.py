"""Clients of the simulated cluster: each asks once, checks every message as it comes, and keeps its history.

Some leave in the middle, some read slowly. What a client may see is decided here: the right tokens, each index once and
in order, then one finish or one status of a kind that its circumstances explain.
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
class History:
    """What one client saw. leave_at, leave_after_s: tokens or time after which it leaves, None to stay."""

    ask: Ask
    answer: Answer
    leave_at: int | None = None
    leave_after_s: float | None = None
    read_pause_s: float = 0.0
    started_at: float = 0.0
    ended_at: float | None = None
    num_tokens: int = 0
    text: list[str] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    finish: FinishItem | None = None
    error: KVRelayError | None = None
    left: bool = False

    @property
    def outcome(self) -> str:
        if self.left:
            return "left"
        if self.finish is not None:
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

    def start(self, history: History) -> None:
        self.histories.append(history)
        history.started_at = self.world.now
        self.node.spawn(self._ask(history), history.ask.name)

    @property
    def num_open(self) -> int:
        return sum(h.ended_at is None for h in self.histories)

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
        self.world.trace("client", f"{history.ask.name} ends: {history.outcome} {history.error or ''}")

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
                if await end.read() is not None:
                    raise Violation(f"{history.ask.name}: something comes after the finish")
                return
            else:
                raise Violation(f"{history.ask.name}: the stream ended without a finish or a status")

    def _token(self, history: History, item: TokenItem) -> None:
        expected, at = history.answer.token_ids, history.num_tokens
        if item.index != at:
            raise Violation(f"{history.ask.name}: index {item.index} after {at} tokens")
        if at >= len(expected) or item.token_id != expected[at]:
            right = expected[at] if at < len(expected) else "none"
            raise Violation(f"{history.ask.name}: token {at} is {item.token_id}, must be {right}")
        history.num_tokens += 1
        history.text.append(item.text)
        history.token_times.append(self.world.now)

    def _finish(self, history: History, item: FinishItem) -> None:
        answer = history.answer
        history.finish = item
        seen = (history.num_tokens, item.completion_tokens, item.reason, "".join(history.text) + item.text)
        right = (len(answer.token_ids), len(answer.token_ids), answer.reason, answer.text)
        if seen != right:
            raise Violation(f"{history.ask.name}: ended as {seen}, must be {right}")
