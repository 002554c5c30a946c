"""A request of two workers for tests of the lifecycle: its facts, its phases, and scripts of events played into it."""

from __future__ import annotations

from coordinator import events as ev
from coordinator.events import Placement
from coordinator.lifecycle import step
from coordinator.states import Phase, RequestFacts, State
from kvrelay.blocks import BlockTable, Ticket
from kvrelay.requests import Incarnation, RequestId, Sampling, StopRule, WorkerId
from kvrelay.session import Work

RID = RequestId("r1")
P, D, OTHER = WorkerId("p0"), WorkerId("d0"), WorkerId("x9")
EOS = 256
TICKET = Ticket(Incarnation("d-life"), 7, BlockTable(0, 16, (3, 4), 18))
PLACED = Placement(P, D, "127.0.0.1:7")


def facts(max_tokens: int = 4, stop_ids: tuple[int, ...] = (EOS,), deadline_at: float | None = None) -> RequestFacts:
    rule = StopRule(max_tokens, frozenset(stop_ids))
    return RequestFacts(RID, tuple(range(17)), Sampling(seed=5), rule, deadline_at=deadline_at)


def work(attempt: int = 0, max_tokens: int = 4, deadline_s: float | None = None) -> Work:
    rule = StopRule(max_tokens, frozenset({EOS}))
    return Work(RID, attempt, tuple(range(17)), 17, Sampling(seed=5), rule, deadline_s=deadline_s)


def play(state: State, *events: ev.Event, now: float = 10.0) -> tuple[State, list[ev.Action]]:
    actions: list[ev.Action] = []
    for event in events:
        state, more = step(state, event, now)
        actions += more
    return state, actions


def in_phase(phase: Phase, max_tokens: int = 4) -> State:
    script: dict[Phase, list[ev.Event]] = {
        Phase.QUEUED: [],
        Phase.RESERVING: [ev.Place(PLACED)],
        Phase.PREFILLING: [ev.Place(PLACED), ev.ReservedBy(D, 0, TICKET)],
        Phase.DECODING: [ev.Place(PLACED), ev.ReservedBy(D, 0, TICKET), ev.TokenArrived(P, 0, 0, 65)],
        Phase.ENDED: [ev.Place(PLACED), ev.ReservedBy(D, 0, TICKET), ev.ClientGone()],
    }
    state, _ = play(State(facts(max_tokens)), *script[phase])
    assert state.phase is phase
    return state
