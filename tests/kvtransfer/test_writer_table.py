"""The prefill side of a hand-off: every (state, event), leases, fences, and when sources come back."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from handoff_values import BLOCK_BYTES, DECODE, PREFILL, key_of, prompt_tokens, ticket_of

from kvrelay.link import (
    LEASE_MARGIN_S,
    LEASE_S,
    AbortedNotice,
    Fenced,
    LandedNotice,
    LinkWelcome,
    Opened,
    OpenRefused,
    OpenTicket,
    Renew,
    Renewed,
)
from kvrelay.requests import Incarnation
from kvtransfer.actions import Count, ExitProcess, Failed, Finished, Post, PushStats, Release, Send, WriterAction
from kvtransfer.manifest import decode
from kvtransfer.receiver_ticket import PEER_GONE_S
from kvtransfer.transports.base import Part, WriteDone, WriteFailed
from kvtransfer.writer import WriterState, WriterTable
from kvtransfer.writer_steps import TABLE, step
from kvtransfer.writer_ticket import (
    FAILED_WRITE_VERDICT_S,
    LINK_LOST_EXIT_S,
    LINK_LOST_HOLD_S,
    STUCK_WRITE_S,
    AbortWanted,
    Event,
    HasLanded,
    LinkLost,
    LinkOpened,
    PartReady,
    QueuedPart,
    Tick,
    WasAborted,
    WasOpened,
    WasRefused,
    WasRenewed,
    WriterRules,
    WritingTicket,
    WroteDone,
    WroteFailed,
    started,
)

T = ticket_of(epoch=1, cached=1)  # writes positions 1, 2, 3 to blocks 11, 12, 13
S = WriterState
OPEN = Send(DECODE, OpenTicket(1, DECODE, key_of().request_id, 1))
FENCED = Send(DECODE, Fenced(1))


def failed(reason: str) -> Failed:
    return Failed(key_of(), DECODE, 1, reason)


def table(**rules: object) -> WriterTable:
    t = WriterTable(PREFILL, BLOCK_BYTES, **rules)  # type: ignore[arg-type]
    assert t.link_opened(DECODE, 0.0) == ()
    assert t.start(T, DECODE, key_of(), prompt_tokens(T), 0.0) == (OPEN,)
    return t


def opened(**rules: object) -> WriterTable:
    t = table(**rules)
    assert t.received(DECODE, Opened(1, LEASE_S), 0.5) == ()
    return t


def give(t: WriterTable, positions: tuple[int, ...], now: float, last: bool = False) -> tuple[WriterAction, ...]:
    """Position p has source block 100 + p."""
    return t.part_ready(DECODE, 1, positions, tuple(100 + p for p in positions), last, now)


def posting() -> WriterTable:
    """Everything is posted as parts 0 (positions 1, 2) and 1 (position 3); nothing has ended."""
    t = opened()
    assert [a.part.part for a in give(t, (1, 2), 1.0) + give(t, (3,), 1.0, last=True) if isinstance(a, Post)] == [0, 1]
    return t


def value(state: WriterState) -> WritingTicket:
    begun = started(T, key_of(), prompt_tokens(T), WriterRules(PREFILL, BLOCK_BYTES), 0.0)
    begun = replace(begun, open_sent=True, asked_at=0.0)
    if state is S.OPENING:
        return begun
    part = (QueuedPart(0, (1, 2, 3), (101, 102, 103), True),)
    given = frozenset((1, 2, 3))
    if state is S.OPEN:
        return replace(begun, state=state, posted=part, given=given, next_part=1)
    told = state is S.CLOSING
    posted = part if told else ()
    return replace(begun, state=state, posted=posted, given=given, next_part=1, told=told, closing_at=1.0)


EVENTS: dict[type, Event] = {
    PartReady: PartReady((), (), False),
    WasOpened: WasOpened(LEASE_S),
    WasRefused: WasRefused("no"),
    WasRenewed: WasRenewed(LEASE_S),
    HasLanded: HasLanded(),
    WasAborted: WasAborted("gone"),
    AbortWanted: AbortWanted(),
    WroteDone: WroteDone(0),
    WroteFailed: WroteFailed(0, "broken", True),
    LinkLost: LinkLost(),
    LinkOpened: LinkOpened(),
    Tick: Tick(),
}
AFTER = {
    S.OPENING: {WasOpened: S.OPEN, WasRefused: S.ENDED, WasAborted: S.ENDED, AbortWanted: S.ENDED, LinkLost: S.ENDED},
    S.OPEN: {
        HasLanded: S.CLOSING,
        WasAborted: S.CLOSING,
        AbortWanted: S.CLOSING,
        WroteFailed: S.CLOSING,
        LinkLost: S.CLOSING,
    },
    S.CLOSING: {WroteDone: S.ENDED},
    S.ENDED: {},
}


def test_the_table_defines_every_pair_and_no_other() -> None:
    assert set(TABLE) == set(itertools.product(WriterState, EVENTS))


@pytest.mark.parametrize(("state", "kind"), list(itertools.product(WriterState, EVENTS)))
def test_each_event_in_each_state_leads_where_the_design_says(state: WriterState, kind: type) -> None:
    after, actions = step(value(state), EVENTS[kind], 2.0)
    assert after.state is AFTER[state].get(kind, state)
    assert not any(isinstance(a, Post) for a in actions)


def test_a_hand_off_opens_posts_lands_and_reports_what_it_cost() -> None:
    t = opened()
    (post,) = give(t, (1, 2), 1.0)
    assert isinstance(post, Post)
    m = decode(post.part.manifest)
    assert post.part == Part(DECODE, 1, 0, (1, 2), (101, 102), (11, 12), post.part.manifest)
    assert (m.epoch, m.incarnation, m.writer, m.part) == (1, DECODE, PREFILL, 0)
    assert (m.positions, m.block_ids, m.last_part, m.checksums) == ((1, 2), (11, 12), False, ())
    (last,) = give(t, (3,), 1.2, last=True)
    assert isinstance(last, Post)
    assert decode(last.part.manifest).last_part
    assert t.transport_event(WriteDone(DECODE, 1, 0, 0.1), 1.3) == (Release((101, 102)),)
    assert t.write_done(DECODE, 1, 1, 1.4, seconds=0.25) == (Release((103,)),)
    stats = PushStats(2, 3, 3 * BLOCK_BYTES, 0.35, 1.5)
    assert t.received(DECODE, LandedNotice(1), 1.5) == (Finished(key_of(), DECODE, 1, stats),)
    assert (t.in_flight, t.next_deadline()) == (0, None)


def test_landed_before_our_own_write_ended_keeps_its_sources_pinned() -> None:
    t = posting()
    t.write_done(DECODE, 1, 1, 1.1)
    assert t.landed(DECODE, LandedNotice(1), 1.2) == ()
    release, finished = t.write_done(DECODE, 1, 0, 1.3)
    assert release == Release((101, 102))
    assert isinstance(finished, Finished)
    assert finished.stats.landed_at == 1.2


def test_parts_wait_for_opened() -> None:
    t = table()
    assert give(t, (1,), 0.1) == ()
    (post,) = t.opened(DECODE, Opened(1, LEASE_S), 0.5)
    assert isinstance(post, Post)
    assert post.part.part == 0


def test_a_ticket_started_before_its_link_is_up_opens_when_it_is() -> None:
    t = WriterTable(PREFILL, BLOCK_BYTES)
    assert t.start(T, DECODE, key_of(), prompt_tokens(T), 0.0) == ()
    assert give(t, (1,), 0.1) == ()
    assert t.opened(DECODE, Opened(1, LEASE_S), 0.2) == (Count("unexpected_message"),)
    assert t.link_opened(DECODE, 2.0) == (OPEN,)
    assert t.next_deadline() == 2.0 + LEASE_S
    assert [type(a) for a in t.opened(DECODE, Opened(1, LEASE_S), 2.1)] == [Post]


def test_a_link_that_cannot_be_made_fails_the_ticket_and_needs_no_fence() -> None:
    t = WriterTable(PREFILL, BLOCK_BYTES)
    t.start(T, DECODE, key_of(), prompt_tokens(T), 0.0)
    give(t, (1,), 0.1)
    assert t.link_lost(DECODE, 1.0) == (Release((101,)), failed("the link to the decode worker was lost"))
    assert t.link_opened(DECODE, 2.0) == ()


def test_the_lease_counts_from_before_open_was_sent_and_its_margin_holds() -> None:
    t = opened()  # sent at 0.0, answered at 0.5
    assert [type(a) for a in give(t, (1,), LEASE_S - LEASE_MARGIN_S - 0.01)] == [Post]
    assert give(t, (2,), LEASE_S - LEASE_MARGIN_S) == ()


def test_the_lease_is_renewed_at_a_third_and_counts_from_before_renew_was_sent() -> None:
    t = opened()
    assert t.next_deadline() == pytest.approx(LEASE_S / 3)
    asked_at = LEASE_S / 3 + 0.1
    assert t.tick(LEASE_S / 3 - 0.1) == ()
    assert t.tick(asked_at) == (Send(DECODE, Renew(1)),)
    assert t.tick(2 * LEASE_S / 3 + 0.2) == ()  # one at a time
    assert give(t, (1,), LEASE_S - 0.5) == ()
    (post,) = t.renewed(DECODE, Renewed(1, LEASE_S), LEASE_S - 0.4)
    assert isinstance(post, Post)
    assert give(t, (2,), asked_at + LEASE_S - LEASE_MARGIN_S) == ()


def test_a_lease_that_is_not_renewed_fails_the_attempt_and_fences_once_writes_ended() -> None:
    t = opened()
    give(t, (1,), 1.0)
    t.tick(LEASE_S / 3 + 0.1)
    assert t.tick(LEASE_S) == (failed("the lease ended without a renewal"),)
    assert give(t, (2,), LEASE_S + 0.1) == (Release((102,)),)
    assert t.write_done(DECODE, 1, 0, LEASE_S + 0.2) == (Release((101,)), FENCED)


def test_an_open_without_an_answer_is_given_up_and_fenced() -> None:
    t = table()
    give(t, (1,), 0.1)
    assert t.tick(LEASE_S) == (Release((101,)), failed("open was not answered within a lease"), FENCED)


def test_a_refused_open_needs_no_fence() -> None:
    t = table()
    give(t, (1,), 0.1)
    actions = t.received(DECODE, OpenRefused(1, "no such ticket"), 0.2)
    assert actions == (Release((101,)), failed("open was refused: no such ticket"))
    assert give(t, (2,), 0.3) == (Release((102,)),)


@pytest.mark.parametrize("ours", [True, False])
def test_fenced_is_said_only_after_every_posted_write_is_done(ours: bool) -> None:
    t = posting()
    actions = t.abort(DECODE, 1, 1.1) if ours else t.received(DECODE, AbortedNotice(1, "cancelled"), 1.1)
    assert actions == (failed("aborted" if ours else "decode aborted: cancelled"),)
    assert t.write_done(DECODE, 1, 1, 1.2) == (Release((103,)),)
    assert t.write_done(DECODE, 1, 0, 1.3) == (Release((101, 102)), FENCED)
    assert t.in_flight == 0


def test_an_abort_before_opened_follows_the_open_with_a_fence() -> None:
    t = table()
    assert t.abort(DECODE, 1, 0.1) == (failed("aborted"), FENCED)
    assert t.opened(DECODE, Opened(1, LEASE_S), 0.2) == ()


def test_a_closing_ticket_keeps_renewing_while_its_writes_run() -> None:
    t = posting()
    t.abort(DECODE, 1, 1.1)
    asked_at = LEASE_S / 3 + 0.1
    assert t.tick(asked_at) == (Send(DECODE, Renew(1)),)
    assert t.aborted(DECODE, AbortedNotice(1, "the ticket is quarantined"), asked_at + 0.1) == ()
    assert t.tick(asked_at + LEASE_S / 3 + 0.01) == (Send(DECODE, Renew(1)),)


def test_a_failed_write_whose_link_stays_up_ends_the_process_and_is_never_fenced() -> None:
    t = posting()
    t.write_done(DECODE, 1, 1, 1.1)
    reason = "write of part 0 failed: broken"
    assert t.write_failed(DECODE, 1, 0, "broken", 1.2) == (Count("write_failed"), failed(reason))
    verdict_at = 1.2 + FAILED_WRITE_VERDICT_S
    assert t.next_deadline() == pytest.approx(min(verdict_at, LEASE_S / 3))
    assert not any(isinstance(a, ExitProcess) for a in t.tick(verdict_at - 0.1))
    (exit_process,) = t.tick(verdict_at)
    assert isinstance(exit_process, ExitProcess)
    assert t.tick(verdict_at + 1) == ()


def test_a_failed_write_to_a_peer_that_died_only_ends_the_attempt() -> None:
    t = posting()
    t.write_failed(DECODE, 1, 0, "disconnected", 1.2)
    assert t.link_lost(DECODE, 1.3) == ()
    assert t.write_failed(DECODE, 1, 1, "disconnected", 1.31) == (Count("write_failed"),)
    assert t.link_lost(DECODE, 1.32, "nobody listens", peer_dead=True) == ()
    assert t.tick(1.3 + LINK_LOST_HOLD_S - 0.01) == ()
    assert t.tick(1.3 + LINK_LOST_HOLD_S) == (Release((101, 102)), Release((103,)))
    assert t.in_flight == 0
    assert t.link_opened(DECODE, 9.0) == ()  # a fence would be untrue


def test_a_failed_write_to_a_peer_that_answers_again_ends_the_process() -> None:
    t = posting()
    t.link_lost(DECODE, 1.2)
    t.write_done(DECODE, 1, 1, 1.3)
    t.write_failed(DECODE, 1, 0, "broken", 1.3)
    (exit_process,) = t.link_opened(DECODE, 1.5)
    assert isinstance(exit_process, ExitProcess)


def test_a_write_that_outlives_its_link_ends_the_process_before_the_peer_reuses_the_blocks() -> None:
    t = posting()
    assert t.link_lost(DECODE, 1.2) == (failed("the link to the decode worker was lost"),)
    assert t.next_deadline() == 1.2 + LINK_LOST_EXIT_S
    (exit_process,) = t.tick(1.2 + LINK_LOST_EXIT_S)
    assert isinstance(exit_process, ExitProcess)


def test_a_failed_write_to_a_peer_that_nothing_proves_dead_ends_the_process_before_its_blocks_are_reused() -> None:
    t = posting()
    t.write_done(DECODE, 1, 1, 1.1)
    t.write_failed(DECODE, 1, 0, "timeout", 1.2)
    t.link_lost(DECODE, 1.3)
    assert t.link_lost(DECODE, 2.0, "no answer") == ()
    assert t.tick(3.29) == ()
    assert [type(action) for action in t.tick(3.3)] == [ExitProcess]
    assert PEER_GONE_S > 3.3 - 1.3


def test_a_write_that_fails_after_the_link_came_back_ends_the_process_at_once() -> None:
    t = posting()
    t.write_done(DECODE, 1, 1, 1.1)
    t.link_lost(DECODE, 1.2)
    assert t.link_opened(DECODE, 1.4) == ()
    assert [type(a) for a in t.write_failed(DECODE, 1, 0, "timeout", 1.7)] == [Count, ExitProcess]


def test_only_what_may_end_the_process_soon_is_in_doubt() -> None:
    t = posting()
    t.write_done(DECODE, 1, 1, 1.1)
    assert not t.in_doubt
    t.link_lost(DECODE, 1.2)
    assert t.in_doubt, "a write is under way and its link is gone"
    t.write_failed(DECODE, 1, 0, "timeout", 1.3)
    assert t.in_doubt, "it may land in a peer that lives"
    t.link_lost(DECODE, 1.4, "nobody listens", peer_dead=True)
    assert not t.in_doubt
    late = opened(refuses_late=True)
    give(late, (1,), 1.0)
    late.link_lost(DECODE, 1.2)
    assert not late.in_doubt


def test_a_write_that_goes_on_without_a_link_is_no_danger_where_late_frames_are_refused() -> None:
    t = opened(refuses_late=True)
    t.part_ready(DECODE, 1, (1,), (101,), False, 1.0)
    t.link_lost(DECODE, 1.2)
    assert t.tick(5.0) == ()
    assert t.write_failed(DECODE, 1, 0, "the link is gone", 5.1)[1] == Release((101,))
    assert t.in_flight == 0


def test_a_fence_that_found_no_link_is_said_on_the_next_one() -> None:
    t = posting()
    t.link_lost(DECODE, 1.2)
    t.write_done(DECODE, 1, 0, 1.3)
    assert t.write_done(DECODE, 1, 1, 1.3) == (Release((103,)),)
    assert t.link_opened(DECODE, 2.0) == (FENCED,)


def test_a_fence_that_was_said_as_the_link_broke_is_said_again_on_the_next_one() -> None:
    t = posting()
    t.write_done(DECODE, 1, 0, 1.1)
    t.write_done(DECODE, 1, 1, 1.1)
    assert t.abort(DECODE, 1, 1.2)[-1] == FENCED
    assert t.link_lost(DECODE, 1.3) == ()
    assert t.link_opened(DECODE, 2.0) == (FENCED,)


def test_a_write_that_was_never_begun_is_no_danger() -> None:
    t = posting()
    t.write_done(DECODE, 1, 1, 1.1)
    actions = t.transport_event(WriteFailed(DECODE, 1, 0, "no peer", posted=False), 1.2)
    assert actions == (Count("write_failed"), Release((101, 102)), failed("write of part 0 failed: no peer"), FENCED)


def test_a_failed_write_over_a_transport_that_refuses_late_frames_is_no_danger() -> None:
    t = opened(refuses_late=True)
    give(t, (1,), 1.0)
    assert FENCED in t.write_failed(DECODE, 1, 0, "link gone", 1.1)


def test_a_write_that_never_ends_ends_the_process() -> None:
    t = posting()
    t.abort(DECODE, 1, 1.0)
    (exit_process,) = t.tick(1.0 + STUCK_WRITE_S)
    assert isinstance(exit_process, ExitProcess)


@pytest.mark.parametrize("lease_s", [0.0, -1.0, math.nan])
def test_a_lease_that_is_none_fails_the_attempt(lease_s: float) -> None:
    assert FENCED in table().opened(DECODE, Opened(1, lease_s), 0.1)


def test_a_longer_lease_than_ours_is_not_believed() -> None:
    t = table()
    t.opened(DECODE, Opened(1, math.inf), 0.1)
    assert give(t, (1,), LEASE_S - LEASE_MARGIN_S) == ()


def test_landed_before_everything_was_posted_is_not_believed() -> None:
    t = opened()
    give(t, (1,), 1.0)
    assert t.landed(DECODE, LandedNotice(1), 1.1) == (
        Count("unexpected_message"),
        failed("the peer said landed before every block was written"),
    )
    assert t.write_done(DECODE, 1, 0, 1.2) == (Release((101,)), FENCED)


def test_the_end_of_a_write_counts_once() -> None:
    t = posting()
    t.write_done(DECODE, 1, 0, 1.1)
    assert t.write_done(DECODE, 1, 0, 1.2) == (Count("unexpected_write_end"),)
    assert t.write_failed(DECODE, 1, 7, "x", 1.2) == (Count("unexpected_write_end"),)


def test_two_decode_workers_may_use_one_epoch() -> None:
    t = opened()
    other = Incarnation("decode-2")
    t.link_opened(other, 0.0)
    t.start(replace(T, incarnation=other), other, key_of("r2"), prompt_tokens(T), 0.0)
    give(t, (1,), 1.0)
    assert t.link_lost(other, 1.1) == (Failed(key_of("r2"), other, 1, "the link to the decode worker was lost"),)
    assert t.state(DECODE, 1) is S.OPEN
    assert (t.busy_with(DECODE), t.busy_with(other)) == (True, False)


def test_a_ticket_of_an_incarnation_that_is_gone_fails_at_once() -> None:
    t = WriterTable(PREFILL, BLOCK_BYTES)
    reason = f"the ticket is of incarnation {DECODE}"
    new = Incarnation("decode-2")
    assert t.start(T, new, key_of(), 10, 0.0) == (Failed(key_of(), new, 1, reason),)


@pytest.mark.parametrize("positions", [(0,), (4,), (1, 1), (2,)])
def test_positions_outside_the_ticket_or_given_twice_are_our_own_bug(positions: tuple[int, ...]) -> None:
    t = opened()
    give(t, (2,), 1.0)
    with pytest.raises(ValueError, match="positions"):
        give(t, positions, 1.0)


def test_manifests_carry_checksums_where_asked_for() -> None:
    t = opened(checksum_of=lambda block_id: block_id * 2)
    (post,) = give(t, (1, 2), 1.0)
    assert isinstance(post, Post)
    assert decode(post.part.manifest).checksums == (202, 204)


def test_what_is_not_for_the_table_is_counted() -> None:
    welcome = LinkWelcome(None, DECODE, None, "nixl", None)  # type: ignore[arg-type]
    assert opened().received(DECODE, welcome, 0.0) == (Count("unexpected_message"),)
