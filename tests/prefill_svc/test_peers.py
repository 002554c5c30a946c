from __future__ import annotations

from kvrelay.requests import Incarnation, WorkerId
from prefill_svc.peers import REDIAL_S, Peers
from worker.events import DropPeer, OpenLink

D = Incarnation("d")
TARGET = OpenLink(D, WorkerId("d-0"), "host:1")


def test_a_lost_peer_is_dialled_again_while_a_hand_off_has_not_ended_and_then_let_go() -> None:
    busy = {D}
    peers = Peers(lambda peer: peer in busy)
    assert peers.want(TARGET) == TARGET
    assert peers.due(0.0) == []
    peers.lost(D, 10.0)
    assert peers.next_due() == 10.0
    assert peers.due(10.0) == [TARGET]
    peers.lost(D, 10.1)  # the dial failed
    assert peers.due(10.1) == []
    assert peers.due(10.1 + REDIAL_S) == [TARGET]
    busy.clear()
    peers.lost(D, 10.4)
    assert peers.due(10.4) == [DropPeer(D)]
    assert peers.next_due() is None
    assert peers.due(99.0) == []


def test_an_answer_ends_the_dialling_and_a_new_hand_off_dials_at_once() -> None:
    peers = Peers(lambda peer: True)
    peers.want(TARGET)
    peers.lost(D, 1.0)
    assert peers.due(1.0) == [TARGET]
    peers.linked(D)
    assert peers.next_due() is None
    peers.lost(D, 5.0)
    assert peers.want(TARGET) == TARGET
    assert peers.due(5.0) == []


def test_a_peer_that_nobody_wants_any_more_is_let_go_of_with_the_end_of_each_link_to_it() -> None:
    """The transport may have got to know it through that link: a dial that was under way is made all the same."""
    peers = Peers(lambda peer: False)
    for at in (1.0, 5.0):
        peers.lost(D, at)
        assert peers.due(at) == [DropPeer(D)]
        assert peers.due(at) == []


def test_a_link_that_comes_up_after_its_hand_off_has_ended_is_let_go_of_with_its_end() -> None:
    busy = {D}
    peers = Peers(lambda peer: peer in busy)
    peers.want(TARGET)
    peers.lost(D, 1.0)
    assert peers.due(1.0) == [TARGET]
    busy.clear()
    assert peers.due(1.1) == [DropPeer(D)]
    peers.linked(D)  # the dial that was under way
    assert peers.due(2.0) == []
    peers.lost(D, 5.0)
    assert peers.due(5.0) == [DropPeer(D)]
    assert peers.next_due() is None
