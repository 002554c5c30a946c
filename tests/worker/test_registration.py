"""A worker tells its coordinators where it is: what a refusal, silence and nonsense of each make it do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from support.greetings import DECODE

from kvrelay.errors import FailedPrecondition, KVRelayError, Unavailable
from kvrelay.rpc.announce import Announcer
from kvrelay.session import WorkerDescription
from worker import registration
from worker.registration import IN_USE_TRIES, Registration

LAYOUT_DIFFERS = FailedPrecondition("layout.block_size differs: 16 here, 32 there", field="layout.block_size")
IN_USE = FailedPrecondition("id is in use", field="worker_id")


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "INTERVAL_S", 0.001)


class Coordinators:
    """answers: what each says, by address; None is a welcome. first: before that, one by one.

    heard: (address, leaving) of every announcement.
    """

    def __init__(self, **answers: KVRelayError | None) -> None:
        self.answers, self.first = answers, dict[str, list[KVRelayError | None]]()
        self.heard: list[tuple[str, bool]] = []
        self.refused: list[str] = []
        self.refused_after: list[int] = []
        self.died: list[BaseException] = []
        self.registration = Registration(DECODE, list(answers), self.on_refused, self.reach, self.died.append)

    def on_refused(self, why: str) -> None:
        self.refused.append(why)
        self.refused_after.append(len(self.heard))

    @asynccontextmanager
    async def reach(self, address: str) -> AsyncIterator[Announcer]:
        async def tell(description: WorkerDescription, leaving: bool) -> str:
            assert description == DECODE
            self.heard.append((address, leaving))
            error = self.first[address].pop(0) if self.first.get(address) else self.answers[address]
            if error is not None:
                raise error
            return address

        yield tell

    def told(self, address: str) -> int:
        return self.heard.count((address, False))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  # what is looked at sets no event
            await asyncio.sleep(0.002)


async def test_a_worker_that_one_of_two_coordinators_refuses_serves_the_other() -> None:
    world = Coordinators(a=LAYOUT_DIFFERS, b=None)
    await until(lambda: min(world.told("a"), world.told("b")) > 20)
    world.answers["b"] = Unavailable("nobody is there")
    world.heard.clear()
    await until(lambda: min(world.told("a"), world.told("b")) > 20)
    assert (world.refused, world.died) == ([], [])
    await world.registration.leave()


async def test_a_worker_that_every_coordinator_refuses_ends_and_says_why() -> None:
    world = Coordinators(a=LAYOUT_DIFFERS, b=None)
    await until(lambda: world.told("a") > 5)
    world.answers["b"] = LAYOUT_DIFFERS
    await until(lambda: bool(world.refused))
    assert world.refused[0] == "refused by b: layout.block_size differs: 16 here, 32 there"
    await world.registration.leave()


async def test_an_id_in_use_is_asked_for_again_as_its_owner_may_be_dying() -> None:
    world = Coordinators(a=IN_USE)
    world.first["a"] = [IN_USE] * IN_USE_TRIES + [None]
    await until(lambda: bool(world.refused))
    assert world.refused_after[0] == IN_USE_TRIES + 1 + IN_USE_TRIES + 1, "after a welcome the tries count anew"
    await world.registration.leave()


async def test_all_are_told_of_its_leaving_once_whatever_the_others_say() -> None:
    world = Coordinators(a=None, b=Unavailable("nobody is there"))
    await until(lambda: world.told("a") > 2)
    await world.registration.leave()
    told = len(world.heard)
    await asyncio.sleep(0.02)  # nothing is announced any more
    assert (len(world.heard), sorted(world.heard[-2:])) == (told, [("a", True), ("b", True)])


async def test_an_answer_that_is_no_message_is_no_answer_and_kills_nobody() -> None:
    """What listens at a coordinator's address may be anything."""
    asked, died = list[bytes](), list[BaseException]()

    async def announce(request: bytes, context: Any) -> bytes:
        asked.append(request)
        return b"\xff\xff\xff"

    server = grpc.aio.server()
    handlers = {"Announce": grpc.unary_unary_rpc_method_handler(announce)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("kvrelay.v1.RegistryService", handlers),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    refused = list[str]()
    worker = Registration(DECODE, [address], refused.append, on_death=died.append)
    await until(lambda: len(asked) > 5 or bool(died))
    await worker.leave()
    await server.stop(0)
    assert (refused, died) == ([], [])
