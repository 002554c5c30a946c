"""One life of a worker: the core, hub, links and registration of the real one, with a task in place of the thread.

Only what touches sockets, threads and processes is replaced: the engine turns in a task whose steps take virtual time,
sessions and links come over the simulated network, and a worker that must end its process dies as a node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from decode_svc.core import DecodeCore
from kvrelay.errors import KVRelayError
from kvrelay.link import LinkHello, LinkWelcome
from kvrelay.models.builtin import builtin_identity
from kvrelay.requests import Incarnation, Role, WorkerId
from kvrelay.session import Load, Report
from kvtransfer.actions import ExitProcess, Expect, Post, Reply, Send, Unexpect
from kvtransfer.receiver import TicketState
from kvtransfer.transports.base import TransportEvent, WriteFailed
from sim.checks import check_plan
from sim.frames import Framed
from sim.leaving import Departure
from sim.memory import Fabric, LedgerPool, Member, OneSided
from sim.network import End, Network
from sim.shapes import WorkerShape, core_of, describe, executor_of
from sim.ways import Ways, requests_of
from sim.world import Node, World
from worker.block_lists import BlockLists
from worker.engine_turn import EngineTurn
from worker.events import Action, BlocksListed, DropPeer, Event, Leave, OpenLink, SendReport, TransportHappened
from worker.link_client import LinkClient
from worker.link_server import LinkServer
from worker.mailbox import Mailbox
from worker.registration import Registration
from worker.session_hub import SessionHub

SLOWEST_STEP_S = 1.8
"""Turns of 1.6 s were seen on a machine with more to do than cores."""

THREAD_S = (0.0, 0.001, 0.02)
"""What a worker's loop may need to hear that the transport, which has a thread of its own, has added a peer."""


class _Mailbox(Mailbox[Event]):
    """The real mailbox; the engine's task is woken by an event of its loop."""

    def __init__(self) -> None:
        super().__init__()
        self.something = asyncio.Event()

    def post(self, event: Event, bulk_bytes: int = 0, *, must: bool = False) -> None:
        super().post(event, bulk_bytes, must=must)
        self.something.set()


class WorkerNode:
    """Starts at once. `dies` is called when it must end its process by itself."""

    def __init__(self, world: World, net: Network, fabric: Fabric, shape: WorkerShape, life: int) -> None:
        self.world, self.net, self.fabric, self.shape = world, net, fabric, shape
        self.node = Node(world, shape.name)
        self.incarnation = Incarnation(f"{shape.name}.{life}")
        self.executor = executor_of(shape)
        self.pool = LedgerPool(shape.num_blocks, cache=shape.prefix_cache)
        self.pool.bytes_of, self.pool.promises = self.executor.pool.read, fabric.promises
        self.mailbox = _Mailbox()
        self.turned = True
        """Whether the engine, which alone touches the core, did anything since somebody looked."""
        self.progress = 0
        self.exited: int | None = None
        self.departure = Departure(self)
        self._ways = Ways(net, self.node)
        self._links: LinkClient | LinkServer
        self.transport: OneSided | Framed
        one_sided = shape.transport == "nixl"
        if one_sided:
            member = Member(self.incarnation, self.node, self.executor.pool, self._on_transport, self.pool)
            self.pool.member = member if shape.role is Role.DECODE else None
            self.transport = OneSided(fabric, member)
            member.expected = self._expected
            member.is_open = self._is_open
        else:
            self.transport = Framed(self.node, self.executor.pool, self._on_transport)
        self.core = core_of(shape, self.incarnation, self.executor, self.pool)
        self._turn = EngineTurn(self.core, self._deliver, self.node.clock)
        self.load: Load = self.core.load(self.node.clock())
        self.description = describe(shape, self.incarnation, self.executor)
        self.block_lists = BlockLists(self.mailbox)
        self.hub = SessionHub(self.mailbox, self.description, lambda: self.load)
        self._open_doors()
        self.node.on_death.append(lambda: net.died(self.node))
        self.node.on_death.append(lambda: fabric.died(self.node))
        self.engine = self.node.spawn(self._run_engine(), "engine")
        self.node.loop.call_soon(self._register)

    def _open_doors(self) -> None:
        identity, name = builtin_identity("hash"), WorkerId(self.shape.name)
        doors = {"session": self._session, "blocks": self._list_blocks}
        if self.shape.role is Role.PREFILL:
            layout, transport = self.executor.layout, self.shape.transport
            verify = self.shape.verify_kv
            hello = LinkHello(
                name, self.incarnation, Incarnation(""), identity.fingerprint, layout, transport, verify_kv=verify
            )

            async def add_peer(welcome: LinkWelcome) -> None:
                self.transport.add_peer(welcome.incarnation)
                await asyncio.sleep(self.world.rng.choice(THREAD_S))

            self._links = LinkClient(self.mailbox, hello, self._ways.link, add_peer)
            if isinstance(self.transport, Framed):
                self.transport.client = self._links
        else:
            pool = OneSided.pool(self.transport) if isinstance(self.transport, OneSided) else None
            welcome = LinkWelcome(name, self.incarnation, self.executor.layout, self.shape.transport, pool)  # type: ignore[arg-type]
            self._links = LinkServer(self.mailbox, welcome, identity.fingerprint, self.shape.verify_kv)
            doors["link"] = self._link
        self.net.listen(self.node, self.shape.address, doors)

    # the engine

    async def _run_engine(self) -> None:
        try:
            await self._turns()
        except Exception as error:
            self.node.loop.call_exception_handler({"message": "the engine failed", "exception": error})

    async def _turns(self) -> None:
        busy, rng = False, self.world.rng
        while True:
            patience = self._turn.patience(busy)
            if patience > 0:
                try:
                    async with asyncio.timeout(patience):
                        await self.mailbox.something.wait()
                except TimeoutError:
                    pass
            self.mailbox.something.clear()
            events = self.mailbox.take(0)
            if self.world.show is not None:
                self._say("<-", events)
            plan = self._turn.begin(events)
            self.turned = True
            busy = plan is not None
            if plan is not None:
                seconds = self.shape.step_s * rng.uniform(0.5, 1.5) * (1 + plan.num_tokens / 64)
                slow = rng.random() < self.world.slow_step_chance
                await asyncio.sleep(seconds + rng.uniform(0.2, SLOWEST_STEP_S) if slow else seconds)
                check_plan(self, plan)
                result = self.executor.run(plan)
                self._turn.finish(plan, result)
                self.turned = True
                self.progress += plan.num_tokens
            self.load = self.core.load(self.node.clock())

    def _deliver(self, actions: list[Action]) -> None:
        """What a worker's shell does with actions."""
        if self.world.show is not None:
            self._say("->", actions)
        for action in actions:
            if isinstance(action, SendReport):
                self.hub.send(action.session, action.report)
            elif isinstance(action, BlocksListed):
                self.block_lists.deliver(action)
            elif isinstance(action, Post):
                self._post(action)
            elif isinstance(action, DropPeer):
                assert isinstance(self._links, LinkClient)
                self._links.let_go(action.peer, self.transport.drop_peer)
            elif isinstance(action, ExitProcess):
                self.exited = 70
                self.node.crash(f"by itself: {action.reason}")
                return
            elif isinstance(action, Leave):
                self.departure.ask(action.grace_s)
            elif isinstance(action, OpenLink):
                assert isinstance(self._links, LinkClient)
                self._links.ensure(action)
            elif isinstance(action, Send):
                assert isinstance(self._links, LinkClient)
                self._links.send(action.peer, action.message)
            elif isinstance(action, Reply):
                assert isinstance(self._links, LinkServer)
                self._links.send(action.writer, action.message)
            else:
                assert isinstance(action, Expect | Unexpect), f"unknown action {action}"

    def _say(self, way: str, values: Sequence[object]) -> None:
        for value in values:
            self.world.trace(self.shape.name, f"{way} {str(value)[:240]}")

    def _post(self, action: Post) -> None:
        part = action.part
        try:
            self.transport.post(part)
        except KVRelayError as error:
            self._on_transport(WriteFailed(part.peer, part.epoch, part.part, error.message, posted=False))

    def _on_transport(self, event: TransportEvent) -> None:
        self.mailbox.post(TransportHappened(event))

    def _expected(self, epoch: int) -> set[int]:
        assert isinstance(self.core, DecodeCore)
        for attempt in self.core._desk.attempts:
            if attempt.ticket is not None and attempt.ticket.epoch == epoch:
                ids = attempt.ticket.table.block_ids
                return {ids[position] for position in attempt.ticket.expected_positions(attempt.num_tokens)}
        return set()

    def _is_open(self, epoch: int) -> bool:
        assert isinstance(self.core, DecodeCore)
        return self.core._p.table.state(epoch) in (TicketState.RECEIVING, TicketState.QUARANTINED)

    # its doors

    async def _session(self, end: End) -> None:
        async def write(report: Report) -> None:
            await end.write(report)

        await self.hub.serve(requests_of(end), write)

    async def _list_blocks(self, end: End) -> None:
        await end.write(await self.block_lists.ask())

    async def _link(self, end: End) -> None:
        assert isinstance(self._links, LinkServer)
        await self._links.serve(requests_of(end), end.write)

    def _register(self) -> None:
        self.registration = Registration(
            self.description, self.shape.coordinators, self.node.crash, self._ways.announcer
        )
