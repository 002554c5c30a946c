"""Random lives: whatever workers, clients and timers do, and however late it is heard, the lifecycle keeps its word."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from support.lifecycles import EOS, RID, TICKET, facts

from coordinator import events as ev
from coordinator.events import Emit, Fail, Finish, Placement, ReleasePlacement, Requeue, SendCommand
from coordinator.lifecycle import accepts, step
from coordinator.states import Phase, State, Tries
from kvrelay import errors
from kvrelay.requests import WorkerId
from kvrelay.session import Abort, Prefill, Reserve

PREFILLS, DECODES = (WorkerId("p0"), WorkerId("p1")), (WorkerId("d0"), WorkerId("d1"))
WORKERS = (*PREFILLS, *DECODES, WorkerId("x9"))
CODES = ("Unavailable", "ResourceExhausted", "Internal", "InvalidArgument", "Aborted")
LIMIT, MAX_TOKENS, STEPS = 4, 8, 80


class Life:
    """One request under random events; every promise is checked after each of them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.state = State(facts(MAX_TOKENS), tries=Tries(LIMIT))
        self.now = 10.0
        self.emitted: list[int] = []
        self.ends: list[Finish | Fail] = []
        self.open: set[tuple[int, WorkerId]] = set()
        """(attempt, worker) that was told to do something and has neither ended nor been told to stop."""
        self.loaded: set[WorkerId] = set()
        self.moves = 0

    # what may happen

    def some_event(self) -> ev.Event:
        likely: list[Callable[[], ev.Event]] = [self.next_step] * 40 + [self.lost] * 12 + [self.said] * 12 + [self.end]
        return self.rng.choice(likely)()

    def next_step(self) -> ev.Event:
        """What a cluster without faults would say next."""
        state, placement = self.state, self.state.placement
        if placement is None:
            return self.place()
        if state.phase is Phase.RESERVING:
            assert placement.decode is not None
            return ev.ReservedBy(placement.decode, state.attempt, TICKET)
        if state.phase is Phase.DECODING and not state.landed and self.rng.random() < 0.3:
            assert placement.decode is not None
            return ev.LandedAt(placement.decode, state.attempt)
        worker = placement.decode if state.phase is Phase.DECODING else placement.prefill
        kind = ev.StopStringHit if self.rng.random() < 0.02 else ev.TokenArrived
        return kind(worker or WORKERS[-1], state.attempt, state.num_tokens, self.rng.choice((65,) * 15 + (EOS,)))

    def place(self) -> ev.Event:
        left = MAX_TOKENS - self.state.num_tokens
        decode = self.rng.choice(DECODES) if left > 1 else None
        return ev.Place(Placement(self.rng.choice(PREFILLS), decode, "a"), (65,) * self.state.num_tokens)

    def lost(self) -> ev.Event:
        return ev.WorkerLost(self.rng.choice(WORKERS))

    def said(self) -> ev.Event:
        """Anything by anybody, of this attempt or an older one."""
        rng, worker = self.rng, self.rng.choice(WORKERS)
        attempt = max(0, self.state.attempt - rng.choice((0, 0, 1, 2)))
        index = max(0, self.state.num_tokens + rng.choice((-1, 0, 0, 1)))
        reason = rng.choice(("stop", "length", "aborted", "failed", "failed"))
        said: list[ev.Event] = [
            ev.ReservedBy(worker, attempt, TICKET),
            ev.RefusedBy(worker, attempt, rng.choice(CODES), "no"),
            ev.TokenArrived(worker, attempt, index, 66),
            ev.StopStringHit(worker, attempt, index, 66),
            ev.LandedAt(worker, attempt),
            ev.PushedBy(worker, attempt),
            ev.WorkerEnded(worker, attempt, reason, rng.choice(CODES)),
            ev.CheckBackDue(attempt),
        ]
        return rng.choice(said)

    def end(self) -> ev.Event:
        last = (ev.ClientGone(), ev.DeadlinePassed(), ev.ReaderTooSlow(), ev.StreamFailed(errors.Internal("x")))
        return self.rng.choice(last)

    # what must hold

    def feed(self, event: ev.Event) -> None:
        before, self.now = self.state, self.now + 0.1
        stale = getattr(event, "attempt", before.attempt) != before.attempt
        self.state, actions = step(before, event, self.now)
        self.note_closed(event)
        if isinstance(event, ev.Place) and before.phase is Phase.QUEUED:
            assert event.placement is not None
            self.loaded = {w for w in (event.placement.prefill, event.placement.decode) if w is not None}
        if stale or before.phase is Phase.ENDED:
            assert (self.state, actions) == (before, [ev.Drop(type(event).__name__)])
        if isinstance(event, ev.TokenArrived):
            assert accepts(before, event) == any(isinstance(a, Emit) for a in actions)
        for action in actions:
            self.note(action, before)
        assert self.state.num_tokens == len(self.emitted)
        if self.state.phase in (Phase.QUEUED, Phase.ENDED):
            assert not self.loaded, "the placement was given back"
        if before.placement is not None and self.state.placement is None:
            assert self.state.attempt == before.attempt + 1
            assert not self.open, "nobody works for an attempt that is over"

    def note_closed(self, event: ev.Event) -> None:
        if isinstance(event, ev.WorkerEnded | ev.RefusedBy):
            self.open.discard((event.attempt, event.worker))
        elif isinstance(event, ev.WorkerLost):
            self.open = {(attempt, worker) for attempt, worker in self.open if worker != event.worker}

    def note(self, action: ev.Action, before: State) -> None:
        if isinstance(action, Emit):
            assert action.index == len(self.emitted)
            self.emitted.append(action.token_id)
        elif isinstance(action, Finish | Fail):
            self.ends.append(action)
        elif isinstance(action, ReleasePlacement):
            self.loaded -= {action.prefill, action.decode}
        elif isinstance(action, Requeue):
            assert action.not_before > self.now
            self.moves += action.loss is not None
        elif isinstance(action, SendCommand):
            self.note_command(action, before)

    def note_command(self, action: SendCommand, before: State) -> None:
        command = action.command
        if isinstance(command, Abort):
            assert command == Abort(RID, before.attempt)
            self.open.remove((command.attempt, action.worker))
        elif isinstance(command, Reserve | Prefill):
            assert command.work.attempt == self.state.attempt
            assert len(command.work.token_ids) == command.work.num_prompt_tokens + self.state.num_tokens
            self.open.add((command.work.attempt, action.worker))

    def check_end(self) -> None:
        """A worker left alone at the end is one whose own rule was met, or whose blocks have landed."""
        assert len(self.ends) == 1
        lost = self.state.tries.lost
        assert lost <= LIMIT
        used_up = isinstance(self.ends[0], Fail) and self.ends[0].loss is not None
        assert self.moves == lost - used_up
        assert used_up == (lost == LIMIT)
        if isinstance(self.ends[0], Fail):
            assert not self.open
        else:
            assert {attempt for attempt, _ in self.open} <= {self.state.attempt}


@pytest.mark.parametrize("first", range(0, 1200, 400))
def test_random_lives_emit_contiguous_tokens_end_once_and_leave_nobody_working(first: int) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(first, first + 400):
        life = Life(seed)
        for _ in range(STEPS):
            life.feed(life.some_event())
        life.feed(ev.ClientGone())
        life.check_end()
        last = life.ends[0]
        outcomes[last.reason.value if isinstance(last, Finish) else type(last.error).__name__] += 1
        outcomes["moved and finished"] += bool(isinstance(last, Finish) and life.moves)
        outcomes["after 3 moves"] += life.moves == 3
    expected = {"stop", "length", "Aborted", "Cancelled", "Internal", "moved and finished", "after 3 moves"}
    assert all(outcomes[name] >= 5 for name in expected), outcomes
