from __future__ import annotations

from dataclasses import replace

from kvrelay.liveness import Liveness, SteadyClock


def test_silence_counts_only_while_ones_own_timer_was_on_time() -> None:
    alive = Liveness.start(2.5, 0.0)
    for tick in range(1, 10):
        alive, gone = alive.check(tick * 0.25, 0.25)
        assert not gone
    alive, gone = alive.check(2.5, 0.25)
    assert gone
    paused = Liveness.start(2.5, 0.0)
    paused, gone = paused.check(60.0, 0.25)
    assert not gone, "our own pause of a minute accuses nobody"
    paused, gone = paused.check(60.25, 0.25)
    assert not gone
    assert Liveness(2.5, 60.0, 62.25).check(62.5, 0.25)[1]


def test_hearing_restarts_the_window() -> None:
    alive = Liveness.start(1.0, 0.0).heard(0.9)
    assert not replace(alive, checked_at=1.0).check(1.25, 0.25)[1]
    assert replace(alive, checked_at=1.7).check(1.95, 0.25)[1]


def test_a_peer_is_given_up_after_exactly_its_time_of_silence() -> None:
    window = Liveness.start(2.5, 10.0)
    for now in (10.5, 11.0, 11.5, 12.0):
        window, gone = window.check(now, 0.5)
        assert not gone
    assert window.silent_s(12.0) == 2.0
    assert window.check(12.5, 0.5)[1]
    assert not window.heard(12.4).check(12.5, 0.5)[1]


def test_a_steady_clock_runs_like_the_other_one_while_it_is_looked_at() -> None:
    clock = SteadyClock()
    assert [clock.at(now) for now in (100.0, 100.5, 101.5, 101.5)] == [100.0, 100.5, 101.5, 101.5]
    assert clock.when(104.0) == 104.0


def test_a_leap_is_a_second_to_a_steady_clock_and_a_step_back_is_nothing() -> None:
    clock = SteadyClock()
    clock.at(100.0)
    assert clock.at(160.0) == 101.0
    assert clock.when(104.0) == 163.0
    assert clock.at(50.0) == 101.0
    assert clock.at(50.25) == 101.25
    assert clock.when(104.0) == 53.0
