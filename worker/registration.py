"""Tells every coordinator where this worker is, once a second: discovery only, the sessions say who is alive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

import structlog

from kvrelay.errors import FailedPrecondition, InvalidArgument, KVRelayError
from kvrelay.fault_points import fault_point
from kvrelay.rpc.announce import Announcer, open_announcer
from kvrelay.session import WorkerDescription

log = structlog.get_logger("worker.registration")

INTERVAL_S = 1.0
SAID_EVERY = 5
"""Failed tries until a coordinator that was never reached is spoken of: one may just be starting."""
IN_USE_TRIES = 5
"""Refusals in a row because our id is in use: the one who uses it may just be dying, and the coordinator soon hears."""


class Registration:
    """One task per coordinator. When every coordinator has refused the worker, `on_refused` is called with why.

    reach: opens the way to the coordinator at an address, over which the worker announces itself. on_death: one of the
    tasks died of this, which nothing in them expects.
    """

    def __init__(
        self,
        description: WorkerDescription,
        coordinators: Sequence[str],
        on_refused: Callable[[str], None],
        reach: Callable[[str], AbstractAsyncContextManager[Announcer]] = open_announcer,
        on_death: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._description = description
        self._on_refused = on_refused
        self._on_death = on_death
        self._reach = reach
        self._refusals: dict[str, str | None] = dict.fromkeys(coordinators)
        self._in_use: dict[str, int] = dict.fromkeys(coordinators, 0)
        self._tasks = [asyncio.ensure_future(self._keep_telling(address)) for address in self._refusals]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and self._on_death is not None:
            self._on_death(error)

    async def leave(self) -> None:
        """Stop announcing and tell every coordinator, once and as far as it listens, that the worker goes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._say_goodbye(address) for address in self._refusals), return_exceptions=True)

    async def _say_goodbye(self, address: str) -> None:
        async with self._reach(address) as announce:
            await announce(self._description, True)

    async def _keep_telling(self, address: str) -> None:
        known, failures = "", 0
        async with self._reach(address) as announce:
            while True:
                fault_point("worker.registration")
                try:
                    told = await announce(self._description, False)
                    if told != known:
                        log.info("registered", coordinator=told, address=address)
                    known, self._refusals[address], self._in_use[address], failures = told, None, 0, 0
                except (FailedPrecondition, InvalidArgument) as error:
                    self._refused(address, error)
                    known = ""
                except KVRelayError as error:
                    failures += 1
                    if known or failures % SAID_EVERY == 0:
                        log.warning("coordinator not reached", address=address, why=error.message)
                    known = ""
                await asyncio.sleep(INTERVAL_S)

    def _refused(self, address: str, error: KVRelayError) -> None:
        if self._refusals[address] is None:
            log.error("refused", coordinator=address, field=error.field, why=error.message)
        if error.field == "worker_id" and self._in_use[address] < IN_USE_TRIES:
            self._in_use[address] += 1
            return
        self._refusals[address] = error.message
        if all(why is not None for why in self._refusals.values()):
            self._on_refused(f"refused by {address}: {error.message}")
