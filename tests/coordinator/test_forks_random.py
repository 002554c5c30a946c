"""Random lives of requests for n sequences: moved before the fork as one, after it each alone, and nobody left working.

Events are told to prompt and sequences as the dispatcher tells them: by the names that workers know them by.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from support.lifecycles import EOS, RID, TICKET, facts

from coordinator import events as ev
from coordinator.events import Emit, Fail, Finish, ForkOff, Placement, SendCommand
from coordinator.forks import child_of
from coordinator.lifecycle import step
from coordinator.states import Phase, State, Tries
from kvrelay import errors
from kvrelay.requests import WorkerId
from kvrelay.session import Abort, Prefill, Reserve, Start

PREFILLS, DECODES = (WorkerId("p0"), WorkerId("p1")), (WorkerId("d0"), WorkerId("d1"))
WORKERS = (*PREFILLS, *DECODES)
N, MAX_TOKENS, STEPS = 3, 6, 120


class One:
    """The prompt, or one sequence: its state, what it emitted, and how it ended."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.emitted: list[int] = []
        self.ends: list[ev.Action] = []
        self.moves = 0


class Family:
    """busy: (worker, request id, attempt, sequence) of every sequence that a worker was given and has not let go of."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.prompt = One(State(replace(facts(MAX_TOKENS), n=N), tries=Tries(4)))
        self.ones = [self.prompt]
        self.now = 10.0
        self.busy: set[tuple[WorkerId, str, int, int]] = set()
        self.starts = 0

    # what may happen

    def turn(self) -> None:
        one = self.rng.choice([o for o in self.ones if o.state.phase is not Phase.ENDED] or self.ones)
        draw = self.rng.random()
        if draw < 0.72:
            self.feed(one, self.next_step(one))
        elif draw < 0.82:
            self.lose(self.rng.choice(WORKERS))
        elif draw < 0.99:
            self.say(one)
        else:
            self.feed(
                one, self.rng.choice((ev.ClientGone(), ev.DeadlinePassed(), ev.StreamFailed(errors.Internal(""))))
            )

    def next_step(self, one: One) -> ev.Event:
        state, placement = one.state, one.state.placement
        if placement is None:
            prefill = self.rng.choice((*PREFILLS, None))
            last = MAX_TOKENS - state.num_tokens == 1
            decode = None if last and prefill else self.rng.choice(DECODES)
            return ev.Place(Placement(prefill, decode, "a"), tuple(one.emitted))
        if state.phase is Phase.RESERVING:
            ticket = TICKET if (placement.prefill is not None) is not (self.rng.random() < 0.03) else None
            return ev.ReservedBy(placement.decode or DECODES[0], state.attempt, ticket)
        worker = (placement.decode if state.phase is Phase.DECODING else placement.prefill) or WORKERS[0]
        if state.facts.n > 1:
            return ev.ForkArrived(worker, state.attempt, tuple(self.rng.choice((65, 65, EOS)) for _ in range(N)))
        kind = ev.StopStringHit if self.rng.random() < 0.05 else ev.TokenArrived
        return kind(worker, state.attempt, state.num_tokens, self.rng.choice((65,) * 12 + (EOS,)))

    def lose(self, worker: WorkerId) -> None:
        self.busy = {entry for entry in self.busy if entry[0] != worker}
        for one in list(self.ones):
            self.feed(one, ev.WorkerLost(worker))

    def say(self, one: One) -> None:
        """A worker of now or of an attempt before speaks of the attempt as a whole, or ends one sequence of it."""
        rng, worker = self.rng, self.rng.choice(WORKERS)
        attempt = max(0, one.state.attempt - rng.choice((0, 0, 1)))
        event = rng.choice(
            (
                ev.LandedAt(worker, attempt),
                ev.PushedBy(worker, attempt),
                ev.RefusedBy(worker, attempt, rng.choice(("ResourceExhausted", "Unavailable")), "no"),
                ev.CheckBackDue(attempt),
                ev.TokenArrived(worker, attempt, one.state.num_tokens + 1, 65),
                ev.ForkArrived(worker, attempt, (65,) * N),
                ev.WorkerEnded(worker, attempt, rng.choice(("failed", "aborted", "length")), "Unavailable"),
            )
        )
        if isinstance(event, ev.WorkerEnded | ev.RefusedBy):
            name, sequence = self.name_of(one, attempt)
            ends_all = worker in PREFILLS or isinstance(event, ev.RefusedBy)
            told = [o for o in self.ones if self.name_of(o, attempt)[0] == name] if ends_all else [one]
            self.busy = {e for e in self.busy if e[:3] != (worker, name, attempt) or not (ends_all or e[3] == sequence)}
            for other in told:
                self.feed(other, event)
        else:
            self.feed(one, event)

    def name_of(self, one: One, attempt: int) -> tuple[str, int]:
        """What workers call it in this attempt."""
        fork = one.state.fork
        if fork is not None or (one is not self.prompt and attempt <= self.prompt.state.attempt):
            return RID, self.ones.index(one) - 1
        return one.state.facts.request_id, 0

    # what must hold

    def feed(self, one: One, event: ev.Event) -> None:
        self.now += 0.05
        before = one.state
        one.state, actions = step(before, event, self.now)
        ended = before.phase is not Phase.ENDED and one.state.phase is Phase.ENDED
        lasts = [a for a in actions if isinstance(a, Finish | Fail | ForkOff)]
        assert len(lasts) == ended, "one last word"
        for action in actions:
            if isinstance(action, SendCommand):
                self.command(one, before, action)
        for action in actions:
            if isinstance(action, Emit):
                assert action.index == len(one.emitted)
                one.emitted.append(action.token_id)
            elif isinstance(action, ev.Requeue):
                one.moves += 1
                assert (one.state.fork, one.state.attempt) == (None, before.attempt + 1)
            elif isinstance(action, ForkOff):
                self.fork(action)
        one.ends += lasts

    def fork(self, action: ForkOff) -> None:
        assert self.ones == [self.prompt]
        assert len(action.token_ids) == N
        attempt = self.prompt.state.attempt
        self.ones += [One(child_of(self.prompt.state, s)) for s in range(N)]
        for sequence, token in enumerate(action.token_ids):
            one = self.ones[1 + sequence]
            kind = ev.StopStringHit if self.rng.random() < 0.1 else ev.TokenArrived
            self.feed(one, kind(action.worker, attempt, 0, token))
            if token == EOS:  # decode ends it by itself
                self.busy = {e for e in self.busy if e[1:] != (RID, attempt, sequence) or e[0] in PREFILLS}

    def command(self, one: One, before: State, action: SendCommand) -> None:
        worker, command = action.worker, action.command
        if isinstance(command, Reserve | Prefill):
            work = command.work
            assert work.n == (N if one is self.prompt else 1)
            assert (work.request_id, work.attempt) == (one.state.facts.request_id, one.state.attempt)
            assert work.sampling == (one.state.facts.sampling)
            assert len(work.token_ids) == work.num_prompt_tokens + len(one.emitted)
            self.busy |= {(worker, work.request_id, work.attempt, s) for s in range(work.n if worker in DECODES else 1)}
        elif isinstance(command, Start):
            self.starts += one is self.prompt
            assert len(command.first_tokens) == one.state.facts.n
        elif isinstance(command, Abort):
            fork = before.fork
            if fork is not None:
                assert worker in DECODES, "a sequence never aborts prefill"
                assert (command.request_id, command.attempt, command.sequence) == (RID, fork.attempt, fork.sequence)
            else:
                assert (command.request_id, command.sequence) == (before.facts.request_id, None)
            key = (worker, command.request_id, command.attempt)
            whole = {e for e in self.busy if e[:3] == key and command.sequence in (None, e[3])}
            assert whole, "an Abort goes to a worker that may hold something, once"
            self.busy -= whole

    def check_end(self) -> None:
        """All ended once. A sequence is left at a decode worker only if its own rule ended it there."""
        for one in self.ones:
            assert len(one.ends) == 1
        failed = {self.name_of(o, o.state.attempt) for o in self.ones if isinstance(o.ends[0], Fail)}
        assert not {(e[1], e[3]) for e in self.busy if e[0] in DECODES} & failed
        assert self.starts <= 1


@pytest.mark.parametrize("first", range(0, 1200, 400))
def test_random_families_end_each_sequence_once_and_leave_nobody_working(first: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + 400):
        family = Family(seed)
        for _ in range(STEPS):
            family.turn()
        for one in list(family.ones):
            if one.state.phase is not Phase.ENDED:
                family.feed(one, ev.ClientGone())
        family.check_end()
        children = family.ones[1:]
        seen["forked"] += bool(children)
        seen["forked after a move"] += bool(children) and family.prompt.moves > 0
        seen["moved alone and finished"] += any(o.moves and isinstance(o.ends[0], Finish) for o in children)
        seen["some moved"] += len({bool(o.moves) for o in children}) == 2
        seen["all finished"] += bool(children) and all(isinstance(o.ends[0], Finish) for o in children)
    for what in ("forked", "forked after a move", "moved alone and finished", "some moved", "all finished"):
        assert seen[what] >= 5, seen
