from __future__ import annotations

from worker.pace import FIRST_TOKENS, MIN_TOKENS, Pace


def test_the_budget_follows_the_measured_speed_within_its_bounds() -> None:
    pace = Pace(target_s=0.4, max_tokens=512)
    assert pace.budget == FIRST_TOKENS
    pace.note(128, 0.32)  # 2.5 ms a token: 160 in 0.4 s
    assert pace.budget == 160
    for _ in range(40):
        pace.note(160, 0.016)
    assert pace.budget == 512, "a fast machine takes the whole budget"
    for _ in range(40):
        pace.note(512, 30.0)
    assert pace.budget == MIN_TOKENS, "a slow one never less than this"


def test_small_steps_say_nothing_and_a_small_maximum_is_kept() -> None:
    pace = Pace(target_s=0.4, max_tokens=512)
    pace.note(1, 0.2)
    assert pace.budget == FIRST_TOKENS
    assert Pace(0.4, 48).budget == 48
    slow = Pace(0.4, 32)
    slow.note(32, 5.0)
    assert slow.budget == 32
