"""Who is known and who is dialled: the registry as a table of events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator import registry as rg
from coordinator.registry import Announced, Dial, Hangup, Leaving, Refuse, Registry, SessionDown, SessionUp, Tick
from kvrelay.blocks import KVLayout
from kvrelay.errors import FailedPrecondition, LayoutMismatch
from kvrelay.requests import Incarnation, Role, WorkerId
from kvrelay.session import ModelIdentity, WorkerDescription

MODEL = ModelIdentity("hash", "builtin-hash", 258, 1000)
LAYOUT = KVLayout(1, 1, 16, 4, "uint8")


def worker(name: str = "p0", life: str = "one", **changes: Any) -> WorkerDescription:
    role = Role.PREFILL if name.startswith("p") else Role.DECODE
    description = WorkerDescription(
        WorkerId(name), role, Incarnation(life), 1, f"h:{name}", MODEL, LAYOUT, 64, "grpc", "hash", 8, 512
    )
    return replace(description, **changes)


def fresh() -> Registry:
    return Registry(rg.Served(MODEL, "hash"))


def play(state: Registry, *events: rg.Event, now: float = 0.0) -> tuple[Registry, list[rg.Action]]:
    actions: list[rg.Action] = []
    for event in events:
        state, more = rg.step(state, event, now)
        actions += more
    return state, actions


def up(*workers: WorkerDescription) -> Registry:
    events: list[rg.Event] = []
    for w in workers:
        events += [Announced(w), SessionUp(w.incarnation, w)]
    return play(fresh(), *events)[0]


def test_a_worker_is_dialled_once_however_often_it_announces_itself() -> None:
    state, actions = play(fresh(), Announced(worker()), Announced(worker()), Announced(worker()))
    assert actions == [Dial(worker())]
    assert state.up == []
    state, actions = play(state, SessionUp(Incarnation("one"), worker()), Announced(worker()))
    assert (state.up, actions) == ([worker()], [])


def test_a_new_incarnation_replaces_the_old_one() -> None:
    new = worker(life="two")
    state, actions = play(up(worker()), Announced(new))
    assert actions == [Hangup(WorkerId("p0"), Incarnation("one")), Dial(new)]
    assert state.up == []


def test_a_new_address_of_the_same_life_replaces_the_old_one() -> None:
    moved = worker(address="h:new")
    _, actions = play(up(worker()), Announced(moved))
    assert actions == [Hangup(WorkerId("p0"), Incarnation("one")), Dial(moved)]


@pytest.mark.parametrize(
    ("changes", "field", "both"),
    [
        ({"protocol_version": 2}, "protocol_version", ("1", "2")),
        ({"executor": "torch"}, "executor", ("'hash'", "'torch'")),
        ({"model": replace(MODEL, fingerprint="f2")}, "model.fingerprint", ("'builtin-hash'", "'f2'")),
        ({"model": replace(MODEL, vocab_size=9)}, "model.vocab_size", ("258", "9")),
        ({"model": replace(MODEL, tokenizer_hash="t2")}, "model.tokenizer_hash", ("''", "'t2'")),
        ({"model": replace(MODEL, max_context=7)}, "model.max_context", ("1000", "7")),
        ({"transport": "nixl"}, "transport", ("'grpc'", "'nixl'")),
        ({"layout": replace(LAYOUT, block_size=32)}, "layout.block_size", ("16", "32")),
        ({"layout": replace(LAYOUT, kv_heads=2)}, "layout.kv_heads", ("1", "2")),
        ({"layout": replace(LAYOUT, layers=2)}, "layout.layers", ("1", "2")),
        ({"layout": replace(LAYOUT, head_dim=8)}, "layout.head_dim", ("4", "8")),
        ({"layout": replace(LAYOUT, dtype="float32")}, "layout.dtype", ("'uint8'", "'float32'")),
        ({"layout": replace(LAYOUT, shards=2)}, "layout.shards", ("1", "2")),
    ],
)
def test_a_worker_that_does_not_pair_is_refused_by_field_and_both_values(
    changes: dict[str, Any], field: str, both: tuple[str, str]
) -> None:
    state = up(worker("p0"))
    after, actions = play(state, Announced(worker("d0", **changes)))
    assert after == state
    assert len(actions) == 1
    assert isinstance(actions[0], Refuse)
    error = actions[0].error
    assert isinstance(error, FailedPrecondition)
    assert isinstance(error, LayoutMismatch) == field.startswith("layout.")
    assert error.field == field
    assert f"{both[0]} here, {both[1]} there" in error.message


def test_a_decode_worker_that_checks_its_blocks_does_not_pair_with_one_that_sends_no_checksums() -> None:
    prefill, decode = worker("p0"), worker("d0")
    checking, sending = replace(decode, verify_kv=True), replace(prefill, verify_kv=True)
    for known, new in ((prefill, checking), (checking, prefill)):
        refusal = play(up(known), Announced(new))[1][0]
        assert isinstance(refusal, Refuse)
        assert refusal.error.field == "verify_kv"
        assert "verify_kv differs: " in refusal.error.message
    assert play(up(sending), Announced(checking))[1] == [Dial(checking)]
    assert play(up(sending), Announced(decode))[1] == [Dial(decode)], "checksums that nobody checks do no harm"


def test_harmless_differences_pair() -> None:
    other = worker("d0", num_blocks=7, max_sequences=1, step_tokens=64, model=replace(MODEL, model_id="another name"))
    assert play(up(worker("p0")), Announced(other))[1] == [Dial(other)]


def test_the_first_worker_fixes_the_layout_until_none_is_left() -> None:
    other = worker("d0", layout=replace(LAYOUT, block_size=32))
    state = up(worker("p0"))
    assert isinstance(play(state, Announced(other))[1][0], Refuse)
    state, _ = play(state, Leaving(WorkerId("p0"), Incarnation("one")), SessionDown(WorkerId("p0"), Incarnation("one")))
    assert state.workers == {}
    assert play(state, Announced(other))[1] == [Dial(other)]


def test_a_lost_session_is_dialled_again_with_growing_waits_while_announced() -> None:
    state, waits = up(worker()), []
    for failure in range(7):
        now = 10.0 * failure
        state, _ = rg.step(state, SessionDown(WorkerId("p0"), Incarnation("one")), now)
        state, _ = rg.step(state, Announced(worker()), now)
        due = state.workers[WorkerId("p0")].redial_at
        assert due is not None
        waits.append(round(due - now, 3))
        assert rg.step(state, Tick(), due - 0.01) == (state, [])
        state, actions = rg.step(state, Tick(), due)
        assert actions == [Dial(worker())]
        assert rg.step(state, Tick(), due + 1) == (state, [])
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


def test_a_silent_worker_without_a_session_is_forgotten_but_never_one_with_a_session() -> None:
    state = up(worker("p0"), worker("d0"))
    state, _ = play(state, SessionDown(WorkerId("p0"), Incarnation("one")))
    state, actions = play(state, Tick(), now=rg.FORGET_S + 1)
    assert (list(state.workers), actions) == (["d0"], [])


def test_a_leaving_worker_gets_nothing_new_and_is_not_dialled_again() -> None:
    state, actions = play(
        up(worker()), Leaving(WorkerId("p0"), Incarnation("one")), Announced(worker()), Tick(), now=0.5
    )
    assert (state.up, actions) == ([], [])
    state, actions = play(state, SessionDown(WorkerId("p0"), Incarnation("one")), Tick(), now=9.0)
    assert (state.workers, actions) == ({}, [])


def test_a_welcome_from_another_life_at_the_same_address_is_taken_as_it_is() -> None:
    state, _ = play(fresh(), Announced(worker()))
    state, actions = play(state, SessionUp(Incarnation("one"), worker(life="two")))
    assert (state.up, actions) == ([worker(life="two")], [])


def test_a_welcome_that_does_not_pair_is_hung_up() -> None:
    state, _ = play(fresh(), Announced(worker()))
    state, actions = play(state, SessionUp(Incarnation("one"), worker(executor="torch")))
    assert state.workers == {}
    assert [type(a) for a in actions] == [Refuse, Hangup]


def test_news_about_an_older_life_changes_nothing() -> None:
    state = up(worker(life="two"))
    old = Incarnation("one")
    for event in (Leaving(WorkerId("p0"), old), SessionDown(WorkerId("p0"), old)):
        assert rg.step(state, event, 1.0) == (state, [])
    assert rg.step(state, SessionUp(old, worker()), 1.0) == (state, [Hangup(WorkerId("p0"), old)])


def test_one_id_belongs_to_one_role() -> None:
    _, actions = play(up(worker("p0")), Announced(worker("p0", life="two", role=Role.DECODE)))
    assert isinstance(actions[0], Refuse)
    assert actions[0].error.field == "worker_id"


def test_an_id_in_use_by_a_live_worker_is_not_given_to_another_process() -> None:
    state = up(worker("p0"))
    other = worker("p0", life="two", address="elsewhere:1")
    after, actions = play(state, Announced(other, silent_s=0.3))
    assert after == state
    assert isinstance(actions[0], Refuse)
    assert actions[0].error.field == "worker_id"
    assert actions[0].error.message == "worker p0: id is in use by a live worker at h:p0 (process 1)"


def test_an_id_goes_to_who_comes_next_once_its_owner_is_silent_gone_or_about_to_go() -> None:
    other = worker("p0", life="two", address="elsewhere:1")
    replaced = [Hangup(WorkerId("p0"), Incarnation("one")), Dial(other)]
    assert play(up(worker("p0")), Announced(other, silent_s=rg.STALLED_S))[1] == replaced
    state, _ = play(up(worker("p0")), Leaving(WorkerId("p0"), Incarnation("one")))
    assert play(state, Announced(other, silent_s=0.1))[1] == replaced
    state, _ = play(up(worker("p0")), SessionDown(WorkerId("p0"), Incarnation("one")))
    assert play(state, Announced(other))[1] == replaced


def test_a_new_life_on_the_same_address_replaces_the_old_one_however_lately_that_was_heard() -> None:
    new = worker("p0", life="two")
    assert play(up(worker("p0")), Announced(new, silent_s=0.0))[1] == [
        Hangup(WorkerId("p0"), Incarnation("one")),
        Dial(new),
    ]


def test_the_context_limit_is_the_smallest_of_model_and_pools() -> None:
    assert rg.context_limit(fresh()) == 1000
    assert rg.context_limit(up(worker("p0"))) == 1000
    assert rg.context_limit(up(worker("p0", num_blocks=10), worker("d0", num_blocks=20))) == 160
