"""How requests are brought into each phase of their life and left there, for bench/aborts.py. Knows no bounds.

Each function makes one wave: it asks, waits for proof that so many requests are in the phase, cancels all of them, and
returns how many the proof covers. A wave whose proof did not come in time covers none.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from running import Running, state_of

from kvrelay.client import AsyncClient
from kvrelay.errors import KVRelayError, ResourceExhausted

POLL_S = 0.02
PROOF_S = 5.0
STILL_S = 1.0
"""Longest time a worker stands still: its coordinator must not give it up."""
TOKENIZER_QUEUE = 128
"""Long texts that may be tokenized or wait for it at once (coordinator.text)."""
LONG_TEXT = 100_000

PREFILL_FLAGS = ("--step-tokens", "64", "--step-seconds", "0.1", "--max-sequences", "4", "--num-blocks", "128")
DECODE_FLAGS = ("--step-seconds", "0.03", "--max-sequences", "64", "--num-blocks", "128")
"""Slow steps and few rows at prefill: each phase lasts long enough to be seen."""
FEW_BLOCKS = (
    ("--step-tokens", "256", "--step-seconds", "0.1", "--max-sequences", "4", "--num-blocks", "48"),
    ("--step-seconds", "0.03", "--max-sequences", "64", "--num-blocks", "48"),
)
"""Prefill's budget of two steps is more than the half of decode's pool that tickets may hold."""
LONG = 700
"""Tokens of a prompt that prefill computes for a second: 11 steps."""

Wave = Callable[["Scene"], Awaitable[int]]


class Scene:
    """A cluster, a client, and the calls of the present wave."""

    def __init__(self, cluster: Running, client: AsyncClient) -> None:
        self.cluster, self.client = cluster, client
        self.calls: list[Call] = []
        self._rng = random.Random(9)

    def ask(self, prompt: list[int] | str, max_tokens: int = 8) -> Call:
        call = Call(self.client, prompt, max_tokens)
        self.calls.append(call)
        return call

    def prompt(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(256) for _ in range(num_tokens)]

    async def seen(self, condition: Callable[[dict[str, Any]], Any], within_s: float = PROOF_S) -> int:
        """What the condition gives for the first topology that satisfies it; 0 when none does in time."""
        ends_at = time.monotonic() + within_s
        while time.monotonic() < ends_at:
            topology = await self.client.topology()
            value = int(condition({**topology, **{w["role"]: w for w in topology["workers"]}}))
            if value:
                return value
            await asyncio.sleep(POLL_S)
        return 0

    async def until(self, condition: Callable[[], bool], within_s: float = PROOF_S) -> bool:
        """Wait for what our own calls show; whether it came in time."""
        ends_at = time.monotonic() + within_s
        while not condition() and time.monotonic() < ends_at:  # noqa: ASYNC110  # a poll, bounded
            await asyncio.sleep(0.002)
        return condition()

    async def leave(self) -> int:
        """Cancel every call of the wave. How many of them had not ended."""
        left = sum(not call.task.done() for call in self.calls)
        for call in self.calls:
            call.task.cancel()
        await asyncio.gather(*(call.task for call in self.calls), return_exceptions=True)
        self.calls.clear()
        return left


class Call:
    """One request under way."""

    def __init__(self, client: AsyncClient, prompt: list[int] | str, max_tokens: int) -> None:
        self._stream = client.generate(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, deadline_s=60.0)
        self.error: KVRelayError | None = None
        self.task = asyncio.create_task(self._read())

    @property
    def accepted(self) -> bool:
        return bool(self._stream.request_id)

    @property
    def num_tokens(self) -> int:
        return len(self._stream.tokens)

    async def _read(self) -> None:
        try:
            async for _ in self._stream:
                pass
        except KVRelayError as error:
            self.error = error


def long_text() -> str:
    """A tenth of a second of tokenising, in the coordinator's tokenizer thread."""
    rng = random.Random(1)
    return "".join(rng.choice("abcdefgh ,.\n") for _ in range(LONG_TEXT))


async def tokenising(scene: Scene) -> int:
    """Proof: one more long text was refused because so many are with the tokenizer. None was accepted yet."""
    text = long_text()
    for _ in range(TOKENIZER_QUEUE + 12):
        scene.ask(text)
    full = await scene.until(lambda: any(isinstance(call.error, ResourceExhausted) for call in scene.calls))
    waiting = sum(not call.task.done() and not call.accepted for call in scene.calls)
    await scene.leave()
    return min(waiting, TOKENIZER_QUEUE) if full else 0


async def waiting_at_coordinator(scene: Scene) -> int:
    """A prompt of 11 steps fills prefill's budget. Proof: the coordinator's own count of queued requests."""
    scene.ask(scene.prompt(LONG))
    await scene.seen(lambda now: now["open_requests"] == 1 and now["queued_requests"] == 0)
    for _ in range(40):
        scene.ask(scene.prompt(LONG))
    waiting = await scene.seen(lambda now: now["queued_requests"] if now["queued_requests"] >= 40 else 0)
    return min(waiting, await scene.leave())


async def waiting_at_prefill(scene: Scene) -> int:
    """Prefill takes 4 prompts a step. Proof: sequences that wait there, by its own report."""
    for _ in range(40):
        scene.ask(scene.prompt(4))
    waiting = await scene.seen(lambda now: now["prefill"]["waiting"] if now["prefill"]["waiting"] >= 8 else 0)
    without = sum(call.num_tokens == 0 and not call.task.done() for call in scene.calls)
    await scene.leave()
    return min(waiting, without)


async def in_prefill(scene: Scene) -> int:
    """One prompt of 11 steps. Proof: some of its tokens are computed, some are not, and none was sampled."""
    call = scene.ask(scene.prompt(LONG))
    began = await scene.seen(lambda now: 0 < now["prefill"]["queued_tokens"] < LONG)
    inside = began and call.num_tokens == 0
    await scene.leave()
    return int(inside)


async def in_transfer(scene: Scene) -> int:
    """Decode stands still, so nothing lands. Proof: its state, and the hand-offs in flight by prefill's report."""
    for _ in range(16):
        scene.ask(scene.prompt(8), max_tokens=64)
    await scene.until(lambda: any(call.num_tokens for call in scene.calls))
    async with standing_still(scene.cluster.pids["decode"]):
        await scene.until(lambda: all(call.num_tokens for call in scene.calls), STILL_S)
        flying = await scene.seen(lambda now: now["prefill"]["transfers_in_flight"], POLL_S)
        begun = sum(call.num_tokens == 1 for call in scene.calls)
        await scene.leave()
    return min(flying, begun)


async def waiting_at_decode(scene: Scene) -> int:
    """Prefill stands still, so tickets stay open, and all tickets may hold half the pool. Proof: decode's report."""
    async with standing_still(scene.cluster.pids["prefill"]):
        for _ in range(14):
            scene.ask(scene.prompt(33))
        waiting = await scene.seen(lambda now: now["decode"]["waiting"], STILL_S)
        await scene.leave()
    return waiting


async def decoding(scene: Scene) -> int:
    """Proof: sequences that run at decode by its report, and a token of each beyond prefill's own."""
    for _ in range(16):
        scene.ask(scene.prompt(8), max_tokens=64)
    await scene.until(lambda: all(call.num_tokens > 1 for call in scene.calls))
    running = await scene.seen(lambda now: now["decode"]["running"])
    begun = sum(call.num_tokens > 1 and not call.task.done() for call in scene.calls)
    await scene.leave()
    return min(running, begun)


@asynccontextmanager
async def standing_still(pid: int) -> AsyncIterator[None]:
    """SIGSTOP for the time of the block; the process is seen to be stopped, not just told to."""
    os.kill(pid, signal.SIGSTOP)
    try:
        while state_of(pid) != "T":  # noqa: ASYNC110  # no event tells
            await asyncio.sleep(0.001)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
