"""Both tables joined by a link, a one-sided transport that can fail late, and a pool that checks every transition.

Thousands of random orders. What must always hold: no block changes state in a way its pool forbids, no block is free
while a write could still land in it, no source comes back while its write runs or comes back twice, and in the end
nothing is held by anybody.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest
from handoff_values import BLOCK_BYTES, BLOCK_SIZE, DECODE, PREFILL, key_of

from kvrelay.blocks import BlockTable, Ticket
from kvtransfer import actions as act
from kvtransfer.receiver import ReceiverTable, TicketState
from kvtransfer.transports.base import Part
from kvtransfer.writer import WriterTable

NUM_BLOCKS, TICKETS, BLOCKS = 40, 6, 5


@dataclass
class World:
    rng: random.Random
    refuses_late: bool
    now: float = 0.0
    block: dict[int, str] = field(default_factory=lambda: dict.fromkeys(range(NUM_BLOCKS), "free"))
    flights: list[Part] = field(default_factory=list)
    up: deque[object] = field(default_factory=deque)
    down: deque[object] = field(default_factory=deque)
    link: bool = True
    writer_dead: bool = False
    exited: bool = False
    lost_while_writing: int = 0
    sources: Counter[int] = field(default_factory=Counter)
    running_sources: Counter[int] = field(default_factory=Counter)
    told: Counter[int] = field(default_factory=Counter)
    landed: set[int] = field(default_factory=set)
    given: dict[int, int] = field(default_factory=dict)
    posted: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.receiver = ReceiverTable(DECODE, BLOCK_BYTES, refuses_late=self.refuses_late)
        self.writer = WriterTable(PREFILL, BLOCK_BYTES, refuses_late=self.refuses_late)
        self.w(self.writer.link_opened(DECODE, 0.0))
        self.tickets: dict[int, Ticket] = {}

    # carrying out actions

    def r(self, done: tuple[act.ReceiverAction, ...]) -> None:
        moves = {
            act.HoldBlocks: ({"reserved"}, "held"),
            act.QuarantineBlocks: ({"reserved"}, "quarantined"),
            act.FreeBlocks: ({"reserved", "quarantined"}, "free"),
        }
        for action in done:
            if type(action) in moves:
                allowed, after = moves[type(action)]
                for block_id in action.block_ids:  # type: ignore[union-attr]
                    assert self.block[block_id] in allowed, (action, self.block[block_id])
                    self.block[block_id] = after
                    if after == "free" and not self.refuses_late:
                        assert not any(block_id in p.dest_ids for p in self.flights), f"{block_id} may be written to"
            elif isinstance(action, act.Reply) and self.link:
                self.down.append(action.message)
            elif isinstance(action, act.LandedTicket):
                assert action.epoch not in self.landed
                self.landed.add(action.epoch)

    def w(self, done: tuple[act.WriterAction, ...]) -> None:
        for action in done:
            if isinstance(action, act.Send) and self.link:
                self.up.append(action.message)
            elif isinstance(action, act.Post):
                assert (action.part.epoch, action.part.part) not in self.posted
                self.posted.add((action.part.epoch, action.part.part))
                self.flights.append(action.part)
                self.running_sources.update(action.part.source_ids)
            elif isinstance(action, act.Release):
                for source in action.source_ids:
                    assert self.running_sources[source] == 0, "released while its write runs"
                    assert self.sources[source] > 0, "released twice"
                    self.sources[source] -= 1
            elif isinstance(action, act.Finished | act.Failed):
                self.told[action.epoch] += 1
            elif isinstance(action, act.ExitProcess):
                self.die()
                self.exited = True

    # things that happen

    def reserve(self) -> None:
        epoch = len(self.tickets) + 1
        free = [b for b, state in self.block.items() if state == "free"]
        if epoch > TICKETS or len(free) < BLOCKS:
            return
        ids = tuple(self.rng.sample(free, BLOCKS))
        for block_id in ids:
            self.block[block_id] = "reserved"
        ticket = Ticket(DECODE, epoch, BlockTable(0, BLOCK_SIZE, ids, BLOCKS * BLOCK_SIZE))
        self.tickets[epoch], self.given[epoch] = ticket, 0
        n = BLOCKS * BLOCK_SIZE - 1
        self.r(self.receiver.reserve(ticket, n, key_of(f"r{epoch}"), self.now))
        if not self.writer_dead:
            self.w(self.writer.start(ticket, DECODE, key_of(f"r{epoch}"), n, self.now))

    def part(self) -> None:
        epochs = [e for e, given in self.given.items() if given < BLOCKS]
        if not epochs or self.writer_dead:
            return
        epoch = self.rng.choice(epochs)
        start = self.given[epoch]
        stop = self.rng.randint(start + 1, BLOCKS)
        self.given[epoch] = stop
        positions = tuple(range(start, stop))
        sources = tuple(epoch * 100 + p for p in positions)
        self.sources.update(sources)
        self.w(self.writer.part_ready(DECODE, epoch, positions, sources, stop == BLOCKS, self.now))

    def message_up(self) -> None:
        if self.up:
            message = self.up.popleft()
            self.r(self.receiver.received(PREFILL, message, self.now))  # type: ignore[arg-type]

    def message_down(self) -> None:
        if self.down and not self.writer_dead:
            self.w(self.writer.received(DECODE, self.down.popleft(), self.now))  # type: ignore[arg-type]

    def write_ends(self, done: bool = True) -> None:
        if not self.flights or self.writer_dead:
            return
        part = self.rng.choice(self.flights)
        if done:
            self.flights.remove(part)
            self.r(self.receiver.notification(PREFILL, part.manifest, self.now))
            if self.rng.random() < 0.2:
                self.r(self.receiver.notification(PREFILL, part.manifest, self.now))
        elif self.refuses_late:
            self.flights.remove(part)
        # a failed one-sided write stays in `flights`: it may land as long as its process lives
        self.running_sources.subtract(part.source_ids)
        if done:
            self.w(self.writer.write_done(DECODE, part.epoch, part.part, self.now))
        else:
            self.w(self.writer.write_failed(DECODE, part.epoch, part.part, "injected", self.now))

    def abort_decode(self) -> None:
        if self.tickets:
            self.r(self.receiver.abort(self.rng.choice(list(self.tickets)), self.now))

    def abort_prefill(self) -> None:
        if self.tickets and not self.writer_dead:
            self.w(self.writer.abort(DECODE, self.rng.choice(list(self.tickets)), self.now))

    def pass_time(self, longest: float = 2.0) -> None:
        """Timers run on time: each side ticks every 0.1 s, after some of the messages that wait."""
        until = self.now + self.rng.random() * longest
        while self.now < until:
            self.now += 0.1
            while self.up and self.rng.random() < 0.9:
                self.message_up()
            self.r(self.receiver.tick(self.now))
            if not self.writer_dead:
                self.w(self.writer.tick(self.now))

    def break_link(self, by_kernel: bool = True) -> None:
        """The stream breaks while both live. What was on the way is lost."""
        if not self.link:
            return
        self.link = False
        self.lost_while_writing += bool(self.flights)
        self.up.clear()
        self.down.clear()
        self.r(self.receiver.link_closed(PREFILL, by_kernel, self.now))
        if not self.writer_dead:
            self.w(self.writer.link_lost(DECODE, self.now))

    def mend_link(self) -> None:
        if not self.link and not self.writer_dead:
            self.link = True
            self.r(self.receiver.link_opened(PREFILL, self.now))
            self.w(self.writer.link_opened(DECODE, self.now))

    def die(self) -> None:
        """The writer's process ends: its writes end with it, its kernel closes the link."""
        self.writer_dead = True
        self.flights.clear()
        self.link = False
        self.up.clear()
        self.down.clear()
        self.r(self.receiver.link_closed(PREFILL, True, self.now))

    def settle(self) -> None:
        """Prompts that never got their last part are aborted by their worker; every write ends and time goes on."""
        for epoch, given in self.given.items():
            if given < BLOCKS and not self.writer_dead:
                self.w(self.writer.abort(DECODE, epoch, self.now))
        for _ in range(200):
            while self.up or self.down:
                self.message_up()
                if self.writer_dead:
                    self.down.clear()
                self.message_down()
            for part in list(self.flights):
                if self.running_sources[part.source_ids[0]]:
                    self.flights.remove(part)
                    self.running_sources.subtract(part.source_ids)
                    self.r(self.receiver.notification(PREFILL, part.manifest, self.now))
                    self.w(self.writer.write_done(DECODE, part.epoch, part.part, self.now))
            self.now += 0.25
            self.r(self.receiver.tick(self.now))
            if not self.writer_dead:
                self.w(self.writer.tick(self.now))
                self.mend_link()


def check_the_end(world: World, seed: int) -> None:
    for epoch in range(1, len(world.tickets) + 1):
        if world.receiver.state(epoch) is TicketState.RESERVED:
            world.r(world.receiver.abort(epoch, world.now))
    stuck = {b: s for b, s in world.block.items() if s not in ("free", "held")}
    assert (seed, stuck, world.receiver.in_flight) == (seed, {}, 0)
    assert sum(s == "held" for s in world.block.values()) == len(world.landed) * BLOCKS
    if world.writer_dead:
        return
    assert (seed, world.writer.in_flight, +world.sources) == (seed, 0, Counter())
    assert (seed, world.told) == (seed, Counter(dict.fromkeys(world.tickets, 1)))


@pytest.mark.parametrize("refuses_late", [False, True])
@pytest.mark.parametrize("mood", ["calm", "aborts", "links", "failures", "death"])
def test_random_orders_never_reuse_a_block_that_may_be_written_to(mood: str, refuses_late: bool) -> None:
    exits = landed = lost_while_writing = 0
    for seed in range(150):
        world = World(random.Random(f"{mood}/{seed}"), refuses_late)
        common = [world.reserve, world.part, world.message_up, world.message_down, world.write_ends] * 3
        common += [lambda w=world: w.pass_time(0.6)]
        extra = {
            "calm": [],
            "aborts": [world.abort_decode, world.abort_prefill, world.pass_time],
            "links": [world.break_link, lambda w=world: w.break_link(False), world.mend_link, world.abort_decode],
            "failures": [lambda w=world: w.write_ends(False), world.pass_time, world.abort_decode],
            "death": [world.abort_decode, world.pass_time],
        }[mood]
        for turn in range(120):
            if mood == "death" and turn == seed % 100:
                world.die()
            world.rng.choice(common + extra)()
        world.settle()
        check_the_end(world, seed)
        exits += world.exited
        lost_while_writing += world.lost_while_writing
        landed += len(world.landed)
    assert landed > 0
    assert (lost_while_writing > 30) == (mood == "links")
    assert (exits > 0) == (mood in ("failures", "links") and not refuses_late)
