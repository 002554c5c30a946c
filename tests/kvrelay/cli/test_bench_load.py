import asyncio
import time

import pytest

from kvrelay.cli.bench_interference import Interference, Phase, compare, measure
from kvrelay.cli.bench_load import Workload, poisson_arrivals, random_prompts, run_load
from kvrelay.cli.bench_plot import survival
from kvrelay.cli.bench_stats import Sample
from kvrelay.errors import Unavailable


class Server:
    """A runner that emits a token every `gap_s`, and counts what is under way."""

    def __init__(self, gap_s=0.001, error=""):
        self.gap_s, self.error = gap_s, error
        self.now = self.most = 0
        self.prompts = []

    async def run(self, sample, prompt, output_tokens):
        self.prompts.append(prompt)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            for _ in range(output_tokens):
                await asyncio.sleep(self.gap_s)
                sample.tokens_at_s.append(time.perf_counter())
            sample.error = self.error
        finally:
            self.now -= 1


def nothing():
    pass


async def test_a_closed_loop_keeps_exactly_so_many_requests_under_way():
    server, done = Server(), []
    prompts = random_prompts(9, 4, 100, seed=1)
    work = Workload(requests=9, output_tokens=3, concurrency=4)
    samples, wall_s = await run_load(work, prompts, server.run, lambda: done.append(1))
    assert (server.most, len(done), [len(s.tokens_at_s) for s in samples]) == (4, 9, [3] * 9)
    assert sorted(server.prompts) == sorted(prompts)
    assert all(s.due_s < s.tokens_at_s[0] for s in samples)
    assert wall_s > 0


async def test_an_open_loop_does_not_wait_for_answers_and_counts_from_when_a_request_was_due():
    server = Server(gap_s=0.2)
    work = Workload(requests=6, output_tokens=1, rate=200.0, seed=3)
    samples, _ = await run_load(work, random_prompts(6, 2, 100, seed=1), server.run, nothing)
    due = [s.due_s - samples[0].due_s for s in samples]
    assert due == pytest.approx(poisson_arrivals(6, 200.0, seed=3))
    assert server.most == 6


def test_arrivals_and_prompts_are_the_same_for_the_same_seed():
    assert poisson_arrivals(50, 10.0, seed=1) == poisson_arrivals(50, 10.0, seed=1)
    assert poisson_arrivals(1, 10.0, seed=1) == [0.0]
    arrivals = poisson_arrivals(4001, 10.0, seed=1)
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] / 4000 == pytest.approx(0.1, rel=0.05)
    assert random_prompts(3, 4, 9, seed=1) == random_prompts(3, 4, 9, seed=1) != random_prompts(3, 4, 9, seed=2)


def phase(*streams, long=()):
    samples = [[Sample(0.0, 8, list(times))] for times in streams]
    return Phase(1.0, 3.0, samples, long=list(long), long_done=list(long))


def test_a_gap_belongs_to_the_phase_in_which_it_began():
    seen = phase((0.5, 0.9, 1.4, 2.0, 3.5, 4.0))
    assert seen.gaps("x").points == ((1.0, pytest.approx(600.0)), (2.5, 1500.0))
    figures = seen.figures()
    assert (figures["output_tokens_per_s"], figures["tbt_ms"]["max"], figures["errors"]) == (1.0, 1500.0, 0)
    assert "long_prompts" not in figures


def test_the_comparison_has_both_phases_and_their_quotient():
    quiet = phase((1.0, 2.0, 3.0), (1.0, 2.0, 3.0))
    busy = phase((1.0, 3.5), (1.0, 3.5), long=[Sample(1.5, 1024, [2.0, 2.5])])
    figures = compare(Interference(streams=2), quiet, busy)
    assert figures["p99_over_quiet_p50"] == 2.5
    assert figures["interfered"]["long_prompts"] == {
        "done": 1,
        "ttft_ms": {"p50": 500.0, "p90": 500.0, "p99": 500.0, "max": 500.0},
    }


async def test_streams_are_measured_while_long_prompts_come_one_after_another(monkeypatch):
    monkeypatch.setattr("kvrelay.cli.bench_interference.SETTLE_S", 0.05)
    server, ticks = Server(), []
    work = Interference(streams=3, long_output=2, seconds=0.3, stream_tokens=20)
    prompts = random_prompts(3, 8, 100, seed=1)
    seen = await measure(
        work, prompts, iter(random_prompts(1000, 16, 100, seed=2)), server.run, lambda: ticks.append(1)
    )
    assert server.now == 0
    assert server.most == 4
    assert len(ticks) >= 3
    assert len(seen.long_done) >= 5
    assert all(len(samples) > 1 for samples in seen.streams)
    figures = seen.figures()
    assert (figures["seconds"], figures["errors"]) == (0.3, 0)
    assert figures["long_prompts"]["done"] == len(seen.long_done)


async def test_a_stream_that_fails_ends_the_measurement():
    work = Interference(streams=1, seconds=0.1, stream_tokens=1)
    with pytest.raises(Unavailable, match="a decoding stream ended with ABORTED"):
        await measure(work, [(1,)], None, Server(error="ABORTED").run, nothing)


def test_survival_is_the_share_of_values_at_least_as_long():
    assert survival([3.0, 1.0, 2.0, 4.0]) == ([1.0, 2.0, 3.0, 4.0], [1.0, 0.75, 0.5, 0.25])
