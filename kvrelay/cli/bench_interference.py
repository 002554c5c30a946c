"""What arriving long prompts do to streams that are already decoding: the same streams, quiet and disturbed.

Each phase: start the streams, wait until all of them decode, then look at them for a while. In the busy phase long
prompts arrive one after another, the next when the last one's short answer is complete. A gap belongs to the phase in
which it began; the streams go on until each such gap is closed, so a stall at the end is not lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from kvrelay.cli.bench_load import Prompt, Runner
from kvrelay.cli.bench_plot import Gaps
from kvrelay.cli.bench_stats import Sample, percentile, summary, ttft_ms
from kvrelay.errors import Unavailable

SETTLE_S = 1.0
START_TIMEOUT_S = 60.0
LAST_GAP_S = 15.0
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Interference:
    """streams prompts decode stream_tokens each at most (then start anew); long prompts ask for long_output tokens."""

    streams: int = 8
    prompt_tokens: int = 128
    long_prompt: int = 1024
    long_output: int = 16
    seconds: float = 20.0
    stream_tokens: int = 4096
    seed: int = 0


@dataclass(slots=True)
class Phase:
    """What was seen between `began_s` and `ended_s`; streams: all samples of each stream, in order."""

    began_s: float
    ended_s: float
    streams: list[list[Sample]]
    long: list[Sample] = field(default_factory=list)
    long_done: list[Sample] = field(default_factory=list)

    def gaps(self, label: str) -> Gaps:
        """Gaps that began in the phase, at the time they ended, and when the long prompts were sent."""
        points = [
            (later - self.began_s, (later - earlier) * 1000.0)
            for sample in self._samples()
            for earlier, later in pairwise(sample.tokens_at_s)
            if self.began_s <= earlier < self.ended_s
        ]
        return Gaps(label, tuple(sorted(points)), tuple(s.due_s - self.began_s for s in self.long))

    def figures(self) -> dict[str, object]:
        """Gaps and token rate of the streams; with long prompts, how many ended and their TTFT."""
        seconds = self.ended_s - self.began_s
        inside = sum(self.began_s <= t < self.ended_s for s in self._samples() for t in s.tokens_at_s)
        figures: dict[str, Any] = {
            "seconds": round(seconds, 3),
            "tbt_ms": summary([gap for _, gap in self.gaps("").points]),
            "output_tokens_per_s": round(inside / seconds, 1),
            "errors": sum(bool(s.error) for s in (*self._samples(), *self.long)),
        }
        if self.long:
            figures["long_prompts"] = {"done": len(self.long_done), "ttft_ms": summary(ttft_ms(self.long_done))}
        return figures

    def _samples(self) -> list[Sample]:
        return [sample for stream in self.streams for sample in stream]


async def measure(
    work: Interference,
    prompts: Sequence[Prompt],
    long_prompts: Iterable[Prompt] | None,
    run: Runner,
    tick: Callable[[], None],
) -> Phase:
    """One phase; quiet when `long_prompts` is None. tick is called about ten times a second while it is measured."""
    streams: list[list[Sample]] = [[] for _ in prompts]
    tasks = [
        asyncio.create_task(_keep_running(samples, prompt, work.stream_tokens, run))
        for samples, prompt in zip(streams, prompts, strict=True)
    ]
    try:
        await _until(lambda: all(s and s[-1].tokens_at_s for s in streams), START_TIMEOUT_S, streams)
        await asyncio.sleep(SETTLE_S)
        phase = Phase(time.perf_counter(), 0.0, streams)
        phase.ended_s = phase.began_s + work.seconds
        if long_prompts is not None:
            tasks.append(asyncio.create_task(_send_long(phase, long_prompts, work.long_output, run)))
        while time.perf_counter() < phase.ended_s:
            await asyncio.sleep(0.1)
            tick()
        await _until(lambda: _gaps_closed(phase), LAST_GAP_S, streams)
        return phase
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def compare(work: Interference, quiet: Phase, busy: Phase) -> dict[str, object]:
    """Both phases and the figure of merit: p99 of the gaps under load over the quiet p50."""
    p50 = percentile([gap for _, gap in quiet.gaps("").points], 50.0)
    p99 = percentile([gap for _, gap in busy.gaps("").points], 99.0)
    return {
        "scenario": "interference",
        "streams": work.streams,
        "prompt_tokens": work.prompt_tokens,
        "long_prompt_tokens": work.long_prompt,
        "long_output_tokens": work.long_output,
        "quiet": quiet.figures(),
        "interfered": busy.figures(),
        "p99_over_quiet_p50": round(p99 / p50, 3),
    }


async def _keep_running(samples: list[Sample], prompt: Prompt, output_tokens: int, run: Runner) -> None:
    """One stream, begun anew whenever it ends well."""
    while not (samples and samples[-1].error):
        samples.append(Sample(time.perf_counter(), len(prompt)))
        await run(samples[-1], prompt, output_tokens)


async def _send_long(phase: Phase, prompts: Iterable[Prompt], output_tokens: int, run: Runner) -> None:
    for prompt in prompts:
        sample = Sample(time.perf_counter(), len(prompt))
        phase.long.append(sample)
        await run(sample, prompt, output_tokens)
        if sample.error:
            return
        phase.long_done.append(sample)


def _gaps_closed(phase: Phase) -> bool:
    """Whether every stream got a token after the phase's end."""
    return all(stream[-1].tokens_at_s and stream[-1].tokens_at_s[-1] >= phase.ended_s for stream in phase.streams)


async def _until(condition: Callable[[], bool], timeout_s: float, streams: Sequence[Sequence[Sample]]) -> None:
    """Wait for the condition; Unavailable when a stream failed or time ran out."""
    until = time.monotonic() + timeout_s
    while True:
        failed = [stream[-1] for stream in streams if stream and stream[-1].error]
        if failed:
            raise Unavailable(f"a decoding stream ended with {failed[0].error}: {failed[0].message}")
        if condition():
            return
        if time.monotonic() > until:
            raise Unavailable(f"the decoding streams made no progress for {timeout_s:g} s")
        await asyncio.sleep(POLL_S)
