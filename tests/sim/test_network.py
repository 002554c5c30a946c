"""The simulated network: order, bounds, cuts that lose the rest, dead and vanished peers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from kvrelay.errors import Unavailable
from sim.network import KERNEL_GIVES_UP_S, WINDOW, Broken, End, Network
from sim.world import Node, World


class Two:
    """A client and a server that keeps what it reads."""

    def __init__(self, reads: bool = True) -> None:
        self.world = World(1)
        self.net = Network(self.world)
        self.a, self.b = Node(self.world, "a"), Node(self.world, "b")
        self.b.on_death.append(lambda: self.net.died(self.b))
        self.got: list[Any] = []
        self.reads = reads
        self.net.listen(self.b, "b:1", {"talk": self.serve})
        self.results: list[Any] = []

    async def serve(self, end: End) -> None:
        while not self.reads:  # noqa: ASYNC110  # set from outside of any loop
            await asyncio.sleep(0.1)
        while (message := await end.read()) is not None:
            self.got.append(message)
            await end.write(("answer", message))

    def run(self, work: Coroutine[Any, Any, Any], until: float = 60.0) -> Any:
        task = self.a.spawn(work)
        assert self.world.run_until(task.done, self.world.now + until), "not done"
        return task.result()


async def test_messages_arrive_in_order_and_are_answered() -> None:
    two = Two()

    async def talk() -> list[Any]:
        end = await two.net.connect(two.a, "b:1", "talk")
        for i in range(50):
            await end.write(i)
        return [await end.read() for _ in range(50)]

    answers = await asyncio.to_thread(two.run, talk())
    assert two.got == list(range(50))
    assert answers == [("answer", i) for i in range(50)]


async def test_a_writer_waits_while_nobody_reads() -> None:
    two = Two(reads=False)
    written: list[int] = []

    async def talk() -> None:
        end = await two.net.connect(two.a, "b:1", "talk")
        for i in range(WINDOW * 2):
            await end.write(i)
            written.append(i)

    def run() -> None:
        two.a.spawn(talk())
        two.world.run_until(lambda: False, 5.0)
        assert len(written) == WINDOW
        two.reads = True
        assert two.world.run_until(lambda: len(written) == WINDOW * 2, 10.0)

    await asyncio.to_thread(run)


async def test_a_cut_loses_what_is_unread_in_both_directions() -> None:
    two = Two()

    async def talk() -> str:
        end = await two.net.connect(two.a, "b:1", "talk")
        await end.write("first")
        assert await end.read() == ("answer", "first")
        await end.write("second")
        two.net.cut(end)
        try:
            while True:
                await end.read()
        except Broken:
            return "broken"

    assert await asyncio.to_thread(two.run, talk()) == "broken"
    assert two.got[0] == "first"
    assert two.net.num_cut == 1


async def test_a_dead_peer_is_told_by_its_kernel_and_nobody_listens_any_more() -> None:
    two = Two()

    async def talk() -> None:
        end = await two.net.connect(two.a, "b:1", "talk")
        await end.write("x")
        await end.read()
        two.b.crash("test")
        with pytest.raises(Unavailable):
            await end.read()
        with pytest.raises(Unavailable, match="nobody listens"):
            await two.net.connect(two.a, "b:1", "talk")

    await asyncio.to_thread(two.run, talk())


async def test_a_vanished_host_is_silent_until_the_kernel_gives_up() -> None:
    two = Two()

    async def talk() -> float:
        end = await two.net.connect(two.a, "b:1", "talk")
        two.net.vanish(two.b)
        before = two.world.now
        await end.write("into the void")
        with pytest.raises(Broken):
            await end.read()
        return two.world.now - before

    assert await asyncio.to_thread(two.run, talk()) == pytest.approx(KERNEL_GIVES_UP_S, abs=0.1)
    assert two.got == []


async def test_a_clogged_direction_delivers_late_and_in_order() -> None:
    two = Two()

    async def talk() -> list[Any]:
        end = await two.net.connect(two.a, "b:1", "talk")
        two.net.clog("a", "b", 3.0)
        for i in range(10):
            await end.write(i)
        await asyncio.sleep(1.0)
        assert two.got == []
        two.net.unclog()
        await end.write(10)
        return [await end.read() for _ in range(11)]

    assert await asyncio.to_thread(two.run, talk()) == [("answer", i) for i in range(11)]
    assert two.world.now < 3.0


async def test_a_node_that_stands_still_runs_nothing_and_its_clock_goes_on() -> None:
    two = Two()
    two.b.paused = True

    async def talk() -> Any:
        end = await two.net.connect(two.a, "b:1", "talk")
        await end.write("x")
        two.world.after(2.0, lambda: setattr(two.b, "paused", False))
        return await end.read()

    before = two.b.clock()
    assert await asyncio.to_thread(two.run, talk()) == ("answer", "x")
    assert two.b.clock() - before > 1.9
