"""Tokens joined to steps: every gap adds up, and the arithmetic over arrays says what `gaps.split` says."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from support import otlp_lines as otlp

from kvrelay.gaps import CAUSES, Cause, StepRecord, TokenPoint, gap_of, split
from kvrelay.steps import StepLog
from kvrelay.tbt.join import Joined, join
from kvrelay.tbt.reader import read


def joined(tmp_path: Path, *spans: dict) -> Joined:
    (tmp_path / "a.jsonl").write_text("".join(otlp.line(span) for span in spans))
    return join(read([tmp_path]))


def causes(made: Joined, gap: int) -> dict[str, float]:
    row = made.gaps.causes(np.array([gap]))[0]
    return {cause.value: pytest.approx(value) for cause, value in zip(CAUSES, row, strict=True) if value > 1e-12}


def every_step(count: int, took: float = 0.01) -> list[dict[str, float]]:
    """Steps back to back, from 1.0 s on the worker's clock."""
    return [{"start_s": 1.0 + n * took, "forward_s": took, "batch": 1} for n in range(count)]


def test_a_gap_of_one_plain_step_is_base_compute_and_delivery(tmp_path: Path) -> None:
    made = joined(
        tmp_path,
        otlp.root("r", "1"),
        otlp.decode("1", [0.10, 0.11, 0.12], [20, 21, 22], sent_s=[0.101, 0.111, 0.121]),
        otlp.steps(every_step(40)),
    )
    assert made.gaps.gap_s.tolist() == [pytest.approx(0.01)] * 2
    assert causes(made, 0) == {"base_compute": 0.009, "delivery": 0.001}
    assert made.step(1).step_id == 21
    assert (made.worker(1), made.num_holes) == ("decode-0", 0)


def test_gaps_are_made_within_a_stream_only(tmp_path: Path) -> None:
    made = joined(
        tmp_path,
        otlp.root("r", "1"),
        otlp.decode("1", [0.1, 0.3], [0, 0], sequence=0),
        otlp.decode("1", [0.2, 0.6], [0, 0], sequence=1),
        otlp.root("s", "2"),
        otlp.decode("2", [5.0], [0]),
    )
    assert made.gaps.gap_s.tolist() == [pytest.approx(0.2), pytest.approx(0.4)]
    assert made.tokens.request.tolist() == [0, 0, 0, 0, 1]
    assert made.tokens.index.tolist() == [0, 1, 0, 1, 0]


def test_segments_of_one_attempt_follow_each_other(tmp_path: Path) -> None:
    made = joined(
        tmp_path,
        otlp.decode("1", [0.3, 0.4], [0, 0], first_index=2),
        otlp.decode("1", [0.1, 0.2], [0, 0]),
        otlp.root("r", "1"),
    )
    assert made.tokens.index.tolist() == [0, 1, 2, 3]
    assert made.gaps.gap_s.tolist() == [pytest.approx(0.1)] * 3


def test_tokens_that_were_not_recorded_leave_a_hole_and_no_gap(tmp_path: Path) -> None:
    made = joined(
        tmp_path, otlp.root("r", "1"), otlp.decode("1", [0.1], [0]), otlp.decode("1", [9.0], [0], first_index=512)
    )
    assert (len(made.gaps), made.num_holes) == (0, 1)


def test_a_move_to_another_worker_is_migration(tmp_path: Path) -> None:
    made = joined(
        tmp_path,
        otlp.root("r", "1"),
        otlp.decode("1", [0.10, 0.11], [20, 21]),
        otlp.decode("1", [0.91], [0], worker="decode-1", incarnation="j", first_index=2, attempt=1),
        otlp.steps(every_step(40)),
    )
    assert causes(made, 1) == {"migration": 0.8}
    assert (made.worker(2), made.step(2)) == ("decode-1", None)


def test_steps_that_were_not_recorded_are_unexplained_and_never_delivery(tmp_path: Path) -> None:
    made = joined(
        tmp_path,
        otlp.root("r", "1"),
        otlp.decode("1", [0.10, 0.20, 0.30, 0.31], [900, 901, 20, 21], sent_s=[0.10, 0.202, 0.30, 0.31]),
        otlp.steps(every_step(40)),
    )
    assert causes(made, 0) == {"unexplained": 0.1, "delivery": 0.002}
    assert causes(made, 1) == {"unexplained": 0.098}
    assert causes(made, 2) == {"base_compute": 0.01}


def test_the_exposed_part_of_a_push_is_waiting_for_kv(tmp_path: Path) -> None:
    made = joined(
        tmp_path,
        otlp.root("r", "1"),
        otlp.piece("kv.push", "1", 0.0, 0.2, "p0", **{"kvrelay.push.exposed_s": 0.05}),
        otlp.decode("1", [0.10, 0.16], [0, 20]),
        otlp.steps(every_step(40)),
    )
    assert causes(made, 0) == {"kv_wait": 0.05, "base_compute": 0.01}


def test_sequences_of_one_prompt_share_its_push_and_one_that_moved_has_its_own(tmp_path: Path) -> None:
    made = joined(
        tmp_path,
        otlp.root("r", "1"),
        otlp.piece("kv.push", "1", 0.0, 0.2, "p0", **{"kvrelay.push.exposed_s": 0.05}),
        otlp.piece("kv.push", "1", 0.3, 0.4, "p0", 1, **{"kvrelay.push.exposed_s": 0.02, "kvrelay.sequence": 1}),
        otlp.decode("1", [0.1], [0], sequence=0),
        otlp.decode("1", [0.1], [0], sequence=1),
        otlp.decode("1", [0.5], [9], first_index=1, sequence=1, attempt=1),
    )
    assert made.tokens.exposed_s.tolist() == [0.05, 0.05, 0.02]


def random_steps(chance: random.Random, count: int) -> list[dict[str, float]]:
    now, records = 5.0, []
    for number in range(count):
        prompt = chance.choice([0, 0, 0, 128])
        record = {
            "step_id": number + 1,
            "start_s": now,
            "schedule_s": chance.choice([0.0002, 0.0003, 0.05]),
            "build_s": 0.0003,
            "forward_s": 0.005 + prompt * 1e-4 + chance.choice([0.0, 0.0, 0.001, 0.3]),
            "sample_s": 0.0005,
            "send_s": 0.0002,
            "batch": chance.randint(1, 8),
            "prefill_tokens": prompt,
            "preemptions": chance.choice([0, 0, 0, 0, 1]),
            "swapped_blocks": chance.choice([0, 0, 0, 0, 3]),
        }
        records.append(record)
        now += sum(value for name, value in record.items() if name.endswith("_s") and name != "start_s")
        now += chance.choice([0.0, 0.0001, 0.001, 0.2, -0.0005])
    return records


def random_stream(chance: random.Random, steps: list[dict[str, float]], name: str) -> list[dict]:
    """Two attempts, whose tokens skip steps, arrive late, early or out of their order, and are read slowly."""
    spans, index, now = [otlp.root(name, name)], 0, 0.0
    for attempt in range(2):
        offsets, sent, ids = [], [], []
        ids_here = sorted(chance.sample(range(1, len(steps) + 1), chance.randint(1, 30)))
        for number, step_id in enumerate(ids_here):
            arrived = now + chance.choice([0.0, 0.004, 0.02, 0.4, 1.0])
            offsets.append(arrived)
            now = max(now, arrived + chance.choice([0.0, 0.0001, 0.004, 0.2, -0.001]))
            sent.append(now)
            ids.append(0 if number == 0 and chance.random() < 0.5 else chance.choice([step_id] * 12 + [5000]))
        spans.append(otlp.decode(name, offsets, ids, sent_s=sent, first_index=index, attempt=attempt))
        exposed = {"kvrelay.push.exposed_s": chance.choice([0.0, 0.01, 3.0])}
        spans.append(otlp.piece("kv.push", name, 0.0, 1.0, "p0", attempt, **exposed))
        index += len(ids)
    return spans


def one_by_one(made: Joined, steps: list[dict[str, float]]) -> list[dict[Cause, float]]:
    """Each gap handed to `split` by itself. A step that was not recorded is no step of prefill."""
    log, by_id = StepLog(), {}
    for step in steps:
        by_id[step["step_id"]] = StepRecord(**{name: step.get(name, 0) for name in StepRecord._fields})
        log.add(by_id[step["step_id"]])
    tokens, found = made.tokens, []
    for token in made.gaps.token.tolist():
        before, point = (
            TokenPoint(
                tokens.arrived_s[at], tokens.sent_s[at], int(tokens.attempt[at]), by_id.get(int(tokens.step_id[at]))
            )
            for at in (token - 1, token)
        )
        lost = before.step is None and tokens.step_id[token - 1] != 0 and before.attempt == point.attempt
        found.append(split(before, point, None if lost else log, float(tokens.exposed_s[token])))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_the_arithmetic_over_arrays_says_what_split_says_of_each_gap(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    steps = random_steps(chance, 60)
    streams = [span for number in range(12) for span in random_stream(chance, steps, f"{number:x}")]
    made = joined(tmp_path, *streams, otlp.steps(steps))
    expected = one_by_one(made, steps)
    assert len(expected) > 100
    for row, wanted in enumerate(expected):
        got = dict(zip(CAUSES, made.gaps.causes(np.array([row]))[0].tolist(), strict=True))
        assert got == {cause: pytest.approx(wanted.get(cause, 0.0), abs=1e-9) for cause in CAUSES}


@pytest.mark.parametrize("seed", range(20))
def test_causes_add_up_to_the_gap_each_and_all_together(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    steps = random_steps(chance, 400)  # the cost model learns while it is asked
    streams = [span for number in range(6) for span in random_stream(chance, steps, f"{number:x}")]
    made = joined(tmp_path, *streams, otlp.steps(steps[:200]), otlp.steps(steps[200:], first_id=201))
    rows = np.arange(len(made.gaps))
    each = made.gaps.causes(rows)
    assert (each >= 0.0).all()
    assert each.sum(axis=1).tolist() == pytest.approx(made.gaps.gap_s.tolist(), abs=1e-9)
    assert made.gaps.total(rows).tolist() == pytest.approx(each.sum(axis=0).tolist(), abs=1e-9)
    for token, gap in zip(made.gaps.token.tolist(), made.gaps.gap_s.tolist(), strict=True):
        at = [TokenPoint(0.0, made.tokens.sent_s[row]) for row in (token - 1, token)]
        assert gap == gap_of(*at)


def test_nothing_recorded_makes_no_gap(tmp_path: Path) -> None:
    made = joined(tmp_path, otlp.root("r", "1"))
    assert (len(made.tokens), len(made.gaps), made.gaps.total(np.arange(0)).sum()) == (0, 0, 0.0)
