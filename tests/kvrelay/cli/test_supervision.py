import pytest

from kvrelay.cli.supervision import GiveUp, Life, Restart, on_exit, reason_in, started


def deaths(*lives_s, served=True, code=1):
    """Delays before each new incarnation of a process whose lives lasted `lives_s`."""
    life, delays = started(Life("decode-0")), []
    for lived_s in lives_s:
        life, decision = on_exit(life, code, lived_s, cluster_served=served)
        assert isinstance(decision, Restart)
        delays.append(decision.delay_s)
        life = started(life)
    return delays


def test_the_first_death_restarts_at_once():
    assert deaths(60.0) == [0.0]


def test_quick_deaths_in_a_row_back_off_up_to_a_bound():
    assert deaths(*[1.0] * 8) == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0]


def test_a_process_that_was_told_to_go_is_started_again_at_once_however_often():
    assert deaths(*[1.0] * 8, code=0) == [0.0] * 8
    _, decision = on_exit(started(Life("decode-1")), 0, 12.34, cluster_served=True)
    assert decision == Restart(0.0, "decode-1 went after 12.3 s; starting incarnation 2 now")


def test_a_process_that_ends_well_as_soon_as_it_starts_backs_off_all_the_same():
    assert deaths(*[0.1] * 4, code=0) == [0.0, 0.5, 1.0, 2.0]


def test_a_long_life_ends_the_row():
    assert deaths(1.0, 1.0, 60.0, 1.0) == [0.0, 0.5, 0.0, 0.5]


def test_a_configuration_error_is_final_and_says_why():
    _, decision = on_exit(started(Life("prefill-0")), 78, 1.0, cluster_served=True, last_line="dtype: unknown")
    assert decision == GiveUp(78, "prefill-0 cannot be configured: dtype: unknown")


def test_a_process_that_never_served_ends_the_start_after_three_deaths():
    life = started(Life("decode-0"))
    for _ in range(2):
        life, decision = on_exit(life, 1, 0.1, cluster_served=False)
        assert isinstance(decision, Restart)
        life = started(life)
    _, decision = on_exit(life, 1, 0.1, cluster_served=False, last_line="ImportError: x")
    assert decision == GiveUp(1, "decode-0 ended 3 times before it served (exit code 1): ImportError: x")


@pytest.mark.parametrize(
    ("code", "words"),
    [(3, "exit code 3"), (-9, "killed by SIGKILL"), (-11, "killed by SIGSEGV"), (-250, "killed by signal 250")],
)
def test_a_restart_is_told_with_cause_and_incarnation(code, words):
    _, decision = on_exit(started(Life("decode-1")), code, 12.34, cluster_served=True)
    assert decision == Restart(0.0, f"decode-1 ended after 12.3 s ({words}); starting incarnation 2 now")


def test_the_last_line_of_who_was_killed_is_not_told_as_its_reason():
    _, killed = on_exit(started(Life("decode-1")), -9, 12.34, cluster_served=True, last_line="link opened")
    assert killed == Restart(0.0, "decode-1 ended after 12.3 s (killed by SIGKILL); starting incarnation 2 now")
    _, ended = on_exit(started(Life("decode-1")), 1, 12.34, cluster_served=True, last_line="no memory")
    assert ended == Restart(0.0, "decode-1 ended after 12.3 s (exit code 1): no memory; starting incarnation 2 now")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            "2026-11-30T05:46:37Z [error    ] cannot start  field=script role=decode why='no such file: /x'",
            "no such file: /x",
        ),
        ('2026-11-30T05:46:37Z [error    ] worker ends  why="it\'s gone" role=decode', "it's gone"),
        ("2026-11-30T05:46:37Z [error    ] worker ends  why=gone role=decode", "gone"),
        ("2026-11-30T05:46:37Z [info     ] link closed  why='this worker is ending'", None),
        ("ImportError: x", None),
    ],
)
def test_of_a_log_line_of_ours_only_its_reason_is_told(line, reason):
    assert reason_in(line) == (line if reason is None else reason)
