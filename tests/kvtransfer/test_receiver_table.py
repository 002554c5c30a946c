"""The decode side of a hand-off: every (state, event), and each rule by which blocks come back."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from handoff_values import BLOCK_BYTES, DECODE, OTHER, PREFILL, key_of, manifest_of, prompt_tokens, ticket_of

from kvrelay.link import (
    LEASE_S,
    AbortedNotice,
    BlockData,
    Fenced,
    LandedNotice,
    LinkHello,
    Opened,
    OpenRefused,
    OpenTicket,
    PartManifest,
    Renew,
    Renewed,
)
from kvrelay.requests import Incarnation
from kvtransfer.actions import (
    Count,
    DropPrefix,
    Expect,
    FreeBlocks,
    HoldBlocks,
    LandedTicket,
    LostTicket,
    QuarantineBlocks,
    ReceiverAction,
    Reply,
    Unexpect,
    WriteBytes,
)
from kvtransfer.manifest import encode
from kvtransfer.receiver import ReceiverTable, TicketState
from kvtransfer.receiver_steps import TABLE, step
from kvtransfer.receiver_ticket import (
    FORCED_S,
    PEER_GONE_S,
    AbortAsked,
    DataArrived,
    Event,
    FencedSaid,
    LinkClosed,
    LinkOpened,
    ManifestArrived,
    OpenAsked,
    ReceiverRules,
    ReceivingTicket,
    RenewAsked,
    Tick,
)

T = ticket_of(epoch=1, cached=1)  # blocks 10 | 11 12 13: position 0 is cached, 1..3 are expected
PROMISED = (11, 12, 13)
OPEN = OpenTicket(1, DECODE, key_of().request_id, 1)
S = TicketState


def table(ticket=T, **rules: object) -> ReceiverTable:
    t = ReceiverTable(DECODE, BLOCK_BYTES, **rules)  # type: ignore[arg-type]
    assert t.reserve(ticket, prompt_tokens(ticket), key_of(), 0.0) == ()
    return t


def opened(**rules: object) -> ReceiverTable:
    t = table(**rules)
    assert Reply(PREFILL, Opened(1, LEASE_S)) in t.open(PREFILL, OPEN, 0.0)
    return t


def quarantined() -> ReceiverTable:
    t = opened()
    t.abort(1, 1.0)
    assert t.state(1) is S.QUARANTINED
    return t


def value(state: TicketState) -> ReceivingTicket:
    rules, expected = ReceiverRules(BLOCK_BYTES), T.expected_positions(prompt_tokens(T))
    writer = None if state is S.RESERVED else PREFILL
    return ReceivingTicket(T, key_of(), rules, expected, frozenset(expected), state, writer, lease_until=LEASE_S)


EVENTS: dict[type, Event] = {
    OpenAsked: OpenAsked(PREFILL, OPEN),
    RenewAsked: RenewAsked(PREFILL),
    DataArrived: DataArrived(PREFILL, BlockData(1, 0, 1, 0, b"x")),
    ManifestArrived: ManifestArrived(PREFILL, manifest_of(T, (1, 2, 3))),
    FencedSaid: FencedSaid(PREFILL),
    AbortAsked: AbortAsked(),
    LinkOpened: LinkOpened(PREFILL),
    LinkClosed: LinkClosed(PREFILL, True),
    Tick: Tick(),
}
AFTER = {
    S.RESERVED: {OpenAsked: S.RECEIVING, AbortAsked: S.ENDED},
    S.RECEIVING: {
        ManifestArrived: S.LANDED,
        FencedSaid: S.ENDED,
        AbortAsked: S.QUARANTINED,
        LinkClosed: S.QUARANTINED,
        Tick: S.QUARANTINED,
    },
    S.LANDED: {},
    S.QUARANTINED: {FencedSaid: S.ENDED, Tick: S.ENDED},
    S.ENDED: {},
}
LATE = LEASE_S + FORCED_S


def test_the_table_defines_every_pair_and_no_other() -> None:
    assert set(TABLE) == set(itertools.product(TicketState, EVENTS))


@pytest.mark.parametrize(("state", "kind"), list(itertools.product(TicketState, EVENTS)))
def test_each_event_in_each_state_leads_where_the_design_says(state: TicketState, kind: type) -> None:
    after, actions = step(value(state), EVENTS[kind], LATE)
    assert after.state is AFTER[state].get(kind, state)
    freed = [a for a in actions if isinstance(a, FreeBlocks)]
    assert freed == ([FreeBlocks(1, PROMISED)] if after.state is S.ENDED and state is not S.ENDED else [])


@pytest.mark.parametrize("kind", [k for k in EVENTS if k not in (AbortAsked, Tick, OpenAsked)])
@pytest.mark.parametrize("state", [S.RECEIVING, S.QUARANTINED])
def test_nobody_but_the_writer_that_opened_moves_a_ticket(state: TicketState, kind: type) -> None:
    strange = replace(EVENTS[kind], **{"sender" if kind is ManifestArrived else "writer": OTHER})  # type: ignore[type-var]
    after, actions = step(value(state), strange, 1.0)
    assert after == value(state)
    assert set(actions) <= {Count("refused_stale")}


def test_open_grants_a_lease_and_all_positions_make_it_land() -> None:
    t = table()
    assert t.open(PREFILL, OPEN, 0.0) == (Expect(T), Reply(PREFILL, Opened(1, LEASE_S)))
    assert t.in_flight == 1
    assert t.notification(PREFILL, encode(manifest_of(T, (3, 1), part=1)), 0.1) == ()
    assert t.manifest(PREFILL, manifest_of(T, (2,), part=0, last=True), 0.2) == (
        HoldBlocks(1, PROMISED),
        Unexpect(1),
        LandedTicket(key_of(), 1),
        Reply(PREFILL, LandedNotice(1)),
    )
    assert (t.in_flight, t.next_deadline(), t.state(1)) == (0, None, None)


def test_landed_is_the_union_of_positions_never_a_count() -> None:
    t = opened()
    assert t.manifest(PREFILL, manifest_of(T, (1, 2), part=0), 0.1) == ()
    assert t.manifest(PREFILL, manifest_of(T, (1, 2), part=0), 0.1) == (Count("duplicate_part"),)
    assert t.manifest(PREFILL, manifest_of(T, (2,), part=1), 0.1) == ()
    assert t.manifest(PREFILL, manifest_of(T, (1,), part=2, last=True), 0.1) == ()
    assert t.state(1) is S.RECEIVING
    assert LandedTicket(key_of(), 1) in t.manifest(PREFILL, manifest_of(T, (3,), part=3), 0.2)


def test_a_ticket_with_nothing_to_write_lands_as_it_opens() -> None:
    t = ReceiverTable(DECODE, BLOCK_BYTES)
    whole = ticket_of(block_ids=(10, 11), cached=1)
    t.reserve(whole, 16, key_of(), 0.0)
    actions = t.open(PREFILL, OPEN, 0.0)
    assert actions[:3] == (Expect(whole), Reply(PREFILL, Opened(1, LEASE_S)), HoldBlocks(1, (11,)))
    assert actions[-1] == Reply(PREFILL, LandedNotice(1))


def test_abort_before_open_frees_at_once_and_later_opens_are_refused() -> None:
    t = table()
    assert t.abort(1, 0.0) == (DropPrefix(1, (10,)), FreeBlocks(1, PROMISED))
    assert t.open(PREFILL, OPEN, 0.1) == (Count("refused_stale"), Reply(PREFILL, OpenRefused(1, "no such ticket")))
    assert t.abort(1, 0.2) == ()


@pytest.mark.parametrize(
    "message",
    [
        OpenTicket(1, Incarnation("decode-0"), key_of().request_id, 1),
        OpenTicket(1, DECODE, key_of("r2").request_id, 1),
        OpenTicket(1, DECODE, key_of().request_id, 2),
        OpenTicket(2, DECODE, key_of().request_id, 1),
    ],
)
def test_an_open_of_another_ticket_request_or_incarnation_is_refused_and_counted(message: OpenTicket) -> None:
    t = table()
    actions = t.open(PREFILL, message, 0.0)
    assert actions[0] == Count("refused_stale")
    assert isinstance(actions[1].message, OpenRefused)  # type: ignore[union-attr]
    assert t.state(1) is S.RESERVED


def test_a_second_writer_is_refused_and_the_first_goes_on() -> None:
    t = opened()
    assert isinstance(t.open(OTHER, OPEN, 0.1)[-1].message, OpenRefused)  # type: ignore[union-attr]
    assert t.open(PREFILL, OPEN, 0.1) == (Count("duplicate_open"),)
    assert t.state(1) is S.RECEIVING


def test_abort_while_receiving_quarantines_until_the_writer_says_fenced() -> None:
    t = opened()
    assert t.abort(1, 1.0) == (
        DropPrefix(1, (10,)),
        QuarantineBlocks(1, PROMISED),
        Count("quarantined"),
        Reply(PREFILL, AbortedNotice(1, "aborted")),
    )
    assert t.fenced(OTHER, 1, 1.1) == (Count("refused_stale"),)
    assert t.manifest(PREFILL, manifest_of(T, (1, 2, 3)), 1.2) == (Count("refused_stale"),)
    assert t.fenced(PREFILL, 1, 1.3) == (Unexpect(1), FreeBlocks(1, PROMISED))
    assert t.fenced(PREFILL, 1, 1.4) == ()


def test_the_end_of_a_lease_frees_nothing() -> None:
    t = opened()
    assert t.tick(LEASE_S - 0.01) == ()
    actions = t.tick(LEASE_S)
    assert QuarantineBlocks(1, PROMISED) in actions
    assert Count("lease_expired") in actions
    assert LostTicket(key_of(), 1, "the writer's lease ended") in actions
    assert not any(isinstance(a, FreeBlocks) for a in actions)


def test_a_renewal_moves_the_end_of_the_lease() -> None:
    t = opened()
    assert t.renew(PREFILL, 1, 4.0) == (Reply(PREFILL, Renewed(1, LEASE_S)),)
    assert t.tick(3.9 + LEASE_S) == ()
    assert t.next_deadline() == 4.0 + LEASE_S


def test_a_long_renewed_ticket_hides_no_expired_one() -> None:
    t = ReceiverTable(DECODE, BLOCK_BYTES)
    for epoch in range(1, 12):
        t.reserve(replace(T, epoch=epoch), prompt_tokens(T), key_of(f"r{epoch}"), 0.0)
        t.open(PREFILL, OpenTicket(epoch, DECODE, key_of(f"r{epoch}").request_id, 1), 0.0)
    t.renew(PREFILL, 1, 4.9)
    lost = [a.epoch for a in t.tick(LEASE_S) if isinstance(a, LostTicket)]
    assert lost == list(range(2, 12))
    assert t.counts()[S.RECEIVING] == 1


def test_a_late_tick_spares_a_lease_once_since_renewals_may_be_waiting_behind_it() -> None:
    t = opened()
    assert t.tick(LEASE_S + 3.0) == (Count("late_tick"),)
    assert t.state(1) is S.RECEIVING
    assert LostTicket(key_of(), 1, "the writer's lease ended") in t.tick(LEASE_S + 6.0)


def test_a_link_closed_by_the_peers_kernel_gives_blocks_back_three_seconds_later() -> None:
    t = opened()
    actions = t.link_closed(PREFILL, True, 1.0)
    assert QuarantineBlocks(1, PROMISED) in actions
    assert LostTicket(key_of(), 1, "the link to the writer was lost") in actions
    assert t.next_deadline() == 1.0 + PEER_GONE_S
    assert t.tick(3.99) == ()
    assert t.tick(4.0) == (Unexpect(1), FreeBlocks(1, PROMISED))


def test_a_writer_that_dies_after_its_ticket_was_aborted_gives_the_blocks_back_three_seconds_later() -> None:
    """Nobody is left to say fenced; without its death as proof they would be away until forced."""
    t = quarantined()
    assert t.link_closed(PREFILL, True, 1.5) == ()
    assert t.next_deadline() == 1.5 + PEER_GONE_S
    assert t.tick(4.4) == ()
    assert t.tick(4.5) == (Unexpect(1), FreeBlocks(1, PROMISED))


def test_a_writer_that_dials_again_takes_the_proof_of_its_death_back() -> None:
    t = quarantined()
    t.link_closed(PREFILL, True, 1.5)
    assert t.link_opened(PREFILL, 2.0) == ()
    assert t.tick(5.0) == ()
    assert t.fenced(PREFILL, 1, 5.1) == (Unexpect(1), FreeBlocks(1, PROMISED))


def test_a_link_that_closed_without_a_word_from_the_peer_proves_nothing_until_forced() -> None:
    t = opened()
    t.link_closed(PREFILL, False, 1.0)
    assert t.next_deadline() == LEASE_S + FORCED_S
    assert t.tick(LEASE_S + FORCED_S - 0.1) == ()
    assert t.tick(LEASE_S + FORCED_S) == (Count("forced"), Unexpect(1), FreeBlocks(1, PROMISED))


def test_a_writer_whose_writes_do_not_end_keeps_renewing_and_is_not_forced() -> None:
    t = quarantined()
    assert t.renew(PREFILL, 1, 30.0) == (Reply(PREFILL, AbortedNotice(1, "the ticket is quarantined")),)
    assert t.tick(LEASE_S + FORCED_S + 1) == ()
    assert t.next_deadline() == 30.0 + LEASE_S + FORCED_S


def test_a_writer_that_gives_up_is_lost_and_its_blocks_are_free() -> None:
    t = opened()
    actions = t.received(PREFILL, Fenced(1), 1.0)
    assert LostTicket(key_of(), 1, "the writer gave up") in actions
    assert actions[-1] == FreeBlocks(1, PROMISED)


@pytest.mark.parametrize(
    "wrong",
    [
        replace(manifest_of(T, (1,)), positions=(0,), block_ids=(10,)),
        replace(manifest_of(T, (1,)), positions=(4,), block_ids=(11,)),
        replace(manifest_of(T, (1, 2)), block_ids=(12, 11)),
        replace(manifest_of(T, (1,)), block_ids=(99,)),
    ],
)
def test_a_manifest_of_other_blocks_loses_the_ticket(wrong: object) -> None:
    actions = opened().manifest(PREFILL, wrong, 1.0)  # type: ignore[arg-type]
    assert actions[0] == Count("bad_manifest")
    assert QuarantineBlocks(1, PROMISED) in actions
    assert isinstance(actions[-1], LostTicket)


@pytest.mark.parametrize(
    "stale",
    [
        replace(manifest_of(T, (1, 2, 3)), epoch=2),
        replace(manifest_of(T, (1, 2, 3)), incarnation=Incarnation("decode-0")),
        replace(manifest_of(T, (1, 2, 3)), writer=OTHER),
    ],
)
def test_a_manifest_of_another_epoch_incarnation_or_writer_is_dropped_and_counted(stale: object) -> None:
    t = opened()
    assert t.manifest(PREFILL, stale, 1.0) == (Count("refused_stale"),)  # type: ignore[arg-type]
    assert t.state(1) is S.RECEIVING


def test_bytes_that_are_no_manifest_are_counted() -> None:
    assert opened().received(PREFILL, PartManifest(b"\xff"), 1.0) == (Count("bad_manifest"),)


def test_who_checks_takes_no_manifest_without_checksums() -> None:
    t = opened(checksum_of={11: 1, 12: 2, 13: 3}.__getitem__)
    actions = t.manifest(PREFILL, manifest_of(T, (1, 2)), 1.0)
    assert actions[0] == Count("bad_manifest")
    assert any(isinstance(a, LostTicket) and a.reason.endswith("carries no checksums") for a in actions)


def test_a_wrong_checksum_loses_the_ticket() -> None:
    t = opened(checksum_of={11: 1, 12: 2, 13: 3}.__getitem__)
    assert t.manifest(PREFILL, replace(manifest_of(T, (1, 2)), checksums=(1, 2)), 1.0) == ()
    actions = t.manifest(PREFILL, replace(manifest_of(T, (3,), part=1), checksums=(4,)), 1.0)
    assert actions[0] == Count("bad_checksum")


def frame(position: int, offset: int, size: int, epoch: int = 1) -> BlockData:
    return BlockData(epoch, 0, position, offset, b"z" * size)


def test_frames_are_written_in_order_and_a_manifest_counts_only_with_its_bytes() -> None:
    t = opened(refuses_late=True, bytes_over_link=True)
    for position, block_id in ((1, 11), (2, 12), (3, 13)):
        assert t.received(PREFILL, frame(position, 0, 40), 0.1) == (WriteBytes(block_id, 0, b"z" * 40),)
        assert t.received(PREFILL, frame(position, 40, 24), 0.1) == (WriteBytes(block_id, 40, b"z" * 24),)
    assert t.received(PREFILL, frame(1, 0, 64), 0.1) == (Count("refused_stale"),)
    actions = t.received(PREFILL, PartManifest(encode(manifest_of(T, (1, 2, 3)))), 0.2)
    assert LandedTicket(key_of(), 1) in actions


@pytest.mark.parametrize(
    ("writer", "data"),
    [(OTHER, frame(1, 0, 8)), (PREFILL, frame(0, 0, 8)), (PREFILL, frame(9, 0, 8)), (PREFILL, frame(1, 0, 8, epoch=2))],
)
def test_frames_of_another_writer_position_or_epoch_are_refused_and_counted(writer, data) -> None:  # type: ignore[no-untyped-def]
    t = opened(refuses_late=True, bytes_over_link=True)
    assert t.block_data(writer, data, 0.1) == (Count("refused_stale"),)


@pytest.mark.parametrize("data", [frame(1, 0, 65), frame(1, 8, 8), frame(1, 0, 0), frame(1, 2**40, 8)])
def test_a_frame_outside_its_block_or_out_of_order_loses_the_ticket(data: BlockData) -> None:
    actions = opened(refuses_late=True, bytes_over_link=True).block_data(PREFILL, data, 0.1)
    assert actions[0] == Count("bad_frame")
    assert FreeBlocks(1, PROMISED) in actions
    assert not any(isinstance(a, WriteBytes) for a in actions)


def test_a_manifest_ahead_of_its_bytes_loses_the_ticket() -> None:
    t = opened(refuses_late=True, bytes_over_link=True)
    t.block_data(PREFILL, frame(1, 0, 40), 0.1)
    assert Count("bad_manifest") in t.manifest(PREFILL, manifest_of(T, (1,)), 0.1)


def test_a_transport_that_refuses_late_frames_needs_no_quarantine() -> None:
    t = opened(refuses_late=True, bytes_over_link=True)
    assert t.abort(1, 1.0) == (
        DropPrefix(1, (10,)),
        Unexpect(1),
        FreeBlocks(1, PROMISED),
        Reply(PREFILL, AbortedNotice(1, "aborted")),
    )
    assert t.block_data(PREFILL, frame(1, 0, 8), 1.1) == (Count("refused_stale"),)


def test_messages_of_unknown_tickets_change_nothing() -> None:
    t = ReceiverTable(DECODE, BLOCK_BYTES)
    answers: list[tuple[ReceiverAction, ...]] = [
        t.received(PREFILL, Renew(5), 0.0),
        t.received(PREFILL, Fenced(5), 0.0),
        t.abort(5, 0.0),
        t.link_closed(PREFILL, True, 0.0),
        t.tick(100.0),
    ]
    assert answers == [(Count("late_renew"),), (), (), (), ()]
    hello = LinkHello(None, PREFILL, DECODE, "", None, "nixl")  # type: ignore[arg-type]
    assert t.received(PREFILL, hello, 0.0) == (Count("unexpected_message"),)


def test_reserving_an_epoch_twice_or_for_another_incarnation_is_our_own_bug() -> None:
    t = table()
    with pytest.raises(ValueError, match="epoch 1"):
        t.reserve(T, 10, key_of(), 0.0)
    with pytest.raises(ValueError, match="another incarnation"):
        t.reserve(replace(T, epoch=2, incarnation=Incarnation("decode-0")), 10, key_of(), 0.0)
