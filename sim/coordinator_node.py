"""One life of a coordinator: roster and dispatcher as they are; clients and workers come over the simulated network.

`generate` is the public service without its protos: it submits, streams, and tells the dispatcher when the client left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from coordinator.dispatch import Dispatcher
from coordinator.live import Live, Times
from coordinator.output import OutputText, output_texts
from coordinator.registry import Served
from coordinator.roster import Roster
from coordinator.session_wire import LIST_DEADLINE_S
from coordinator.states import RequestFacts
from coordinator.stream import ErrorItem, FinishItem
from coordinator.text import ByteCodec
from kvrelay.blocks import BlockKey, BlockList, KeyScope, block_keys
from kvrelay.config import CoordinatorConfig
from kvrelay.errors import Unavailable
from kvrelay.models.builtin import builtin_identity
from kvrelay.requests import RequestId, Sampling, StopRule
from kvrelay.session import Command, Report, WorkerDescription
from sim.network import End, Network
from sim.watch import EmissionCheck
from sim.world import Node, World


@dataclass(frozen=True)
class Ask:
    """What a client sends. deadline_s: time the client gives it, None for ever. after: sent when that one has ended."""

    name: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    stop: StopRule
    stop_strings: tuple[str, ...] = ()
    deadline_s: float | None = None
    n: int = 1
    cache_salt: str = ""
    prefix_cache: bool = True
    after: str = ""
    include_stop: bool = False

    def texts(self, codec: ByteCodec, n: int) -> list[OutputText]:
        """What turns the tokens of n sequences into text, as the service makes it."""
        stop = self.stop
        return output_texts(
            n, codec.detokenizer, self.stop_strings, stop.stop_token_ids, self.include_stop, stop.min_tokens
        )


class CoordinatorNode:
    def __init__(self, world: World, net: Network, name: str, life: int, config: CoordinatorConfig) -> None:
        self.world, self.net, self.name = world, net, name
        self.node = Node(world, name)
        self.address = f"{name}:1"
        served = Served(builtin_identity("hash"), "hash")
        self.roster = Roster(f"{name}.{life}", served, self._dial, self._list_blocks, wants_steps=True)
        self.dispatcher = Dispatcher(config, self.roster)
        self.roster.owner = EmissionCheck(self.dispatcher)
        self.first_try: set[str] = set()
        """Requests that ended well without having been placed twice."""
        self._codec = ByteCodec()
        self._serial = 0
        self._life = life
        doors = {"announce": self._announced, "generate": self._generate}
        net.listen(self.node, self.address, doors)
        self.node.on_death.append(lambda: net.died(self.node))
        self.tasks = [self.node.spawn(self.roster.run(), "roster"), self.node.spawn(self.dispatcher.run(), "sweep")]

    @asynccontextmanager
    async def _dial(self, description: WorkerDescription) -> AsyncIterator[_SessionCall]:
        end = await self.net.connect(self.node, description.address, "session")
        try:
            yield _SessionCall(end)
        finally:
            end.close()

    async def _list_blocks(self, description: WorkerDescription) -> BlockList:
        try:
            async with asyncio.timeout(LIST_DEADLINE_S):
                end = await self.net.connect(self.node, description.address, "blocks")
                try:
                    blocks: BlockList | None = await end.read()
                finally:
                    end.close()
        except TimeoutError:
            raise Unavailable("no answer to the question what is cached") from None
        if blocks is None:
            raise Unavailable("the answer did not come")
        return blocks

    async def _announced(self, end: End) -> None:
        said = await end.read()
        if said is None:  # cut before it was here: a server would never hear of such a call
            return
        description, leaving = said
        if leaving:
            self.roster.leaving(description.worker_id, description.incarnation)
        else:
            self.roster.announced(description)
        await end.write(self.roster.coordinator_id)

    async def _generate(self, end: End) -> None:
        ask: Ask | None = await end.read()
        if ask is None:
            return
        now = time.monotonic()
        self._serial += 1
        facts = RequestFacts(
            request_id=RequestId(f"{ask.name}@{self.name}.{self._life}.{self._serial}"),
            prompt_ids=ask.prompt_ids,
            sampling=ask.sampling,
            stop=ask.stop,
            deadline_at=None if ask.deadline_s is None else now + ask.deadline_s,
            cache_salt=ask.cache_salt,
            n=ask.n,
            prefix_cache=ask.prefix_cache,
        )
        facts = replace(facts, keys=self._keys(facts))
        self.dispatcher.check_room(ask.stop.max_tokens != 1)
        text, *more = ask.texts(self._codec, ask.n)
        live = self.dispatcher.submit(facts, text, Times(now, 0), tuple(more))
        try:
            await self._stream(live, end)
            if all(one.state.attempt == 0 for one in live.children or (live,)):
                self.first_try.add(ask.name)
        except asyncio.CancelledError:
            if live.stream.cut is None:
                raise
            raise live.stream.cut from None
        finally:
            self.dispatcher.leave(live.id)

    def _keys(self, facts: RequestFacts) -> tuple[BlockKey, ...]:
        """As the service makes them."""
        if not facts.prefix_cache or not self.dispatcher.routes_by_keys:
            return ()
        scope = KeyScope(facts.tenant, builtin_identity("hash").fingerprint, cache_salt=facts.cache_salt)
        return block_keys(scope, facts.prompt_ids, self.roster.block_size)

    @staticmethod
    async def _stream(live: Live, end: End) -> None:
        open_sequences = live.facts.n
        while open_sequences:
            item = await live.stream.take()
            if isinstance(item, ErrorItem):
                raise item.error
            live.stream.writing(asyncio.current_task())
            await end.write(item)
            live.stream.writing(None)
            if isinstance(item, FinishItem):
                open_sequences -= 1


class _SessionCall:
    def __init__(self, end: End) -> None:
        self._end = end

    async def write(self, command: Command) -> None:
        await self._end.write(command)

    async def read(self) -> Report | None:
        report: Report | None = await self._end.read()
        return report
