import pytest

from kvrelay.cli.bench_stats import Sample, describe, gaps_ms, percentile, summary


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([7.0], 50, 7.0),
        ([7.0], 99, 7.0),
        ([1.0, 2.0], 50, 1.5),
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([1.0, 2.0, 3.0, 4.0], 90, 3.7),
        (list(map(float, range(101))), 99, 99.0),
        ([5.0, 1.0], 0, 1.0),
        ([5.0, 1.0], 100, 5.0),
    ],
)
def test_a_percentile_interpolates_between_the_closest_ranks(values, percent, expected):
    assert percentile(values, percent) == pytest.approx(expected)


def test_there_is_no_percentile_of_nothing():
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)
    assert summary([]) is None


def test_gaps_are_the_times_between_neighbouring_tokens():
    assert gaps_ms([1.0, 1.25, 1.75]) == [250.0, 500.0]
    assert gaps_ms([1.0]) == []
    assert gaps_ms([]) == []


def test_a_run_is_described_from_the_requests_that_ended_well():
    samples = [
        Sample(due_s=0.0, prompt_tokens=10, tokens_at_s=[0.5, 1.0, 1.5], exposed_s=0.05),
        Sample(due_s=1.0, prompt_tokens=20, tokens_at_s=[2.0, 2.25], exposed_s=0.2),
        Sample(due_s=1.0, prompt_tokens=30, tokens_at_s=[9.0], error="UNAVAILABLE", message="decode-0 was lost"),
        Sample(due_s=1.0, prompt_tokens=30, error="UNAVAILABLE"),
    ]
    assert describe(samples, wall_s=2.0) == {
        "requests": 4,
        "errors": 2,
        "error_counts": {"UNAVAILABLE": 2},
        "first_error": "decode-0 was lost",
        "wall_s": 2.0,
        "ttft_ms": {"p50": 750.0, "p90": 950.0, "p99": 995.0, "max": 1000.0},
        "tbt_ms": {"p50": 500.0, "p90": 500.0, "p99": 500.0, "max": 500.0},
        "output_tokens_per_s": 2.5,
        "prompt_tokens_per_s": 15.0,
        "exposed_hand_off_ms_p50": 125.0,
        "exposed_hand_off_share_of_ttft_p50": 0.15,
    }


def test_a_run_without_hand_offs_says_none():
    figures = describe([Sample(due_s=0.0, prompt_tokens=1, tokens_at_s=[1.0])], wall_s=1.0)
    assert figures["exposed_hand_off_ms_p50"] is None
    assert figures["tbt_ms"] is None
