"""The picture of a recording: one request over the steps of its workers, its gaps by cause, and all gaps by cause."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvrelay.errors import FailedPrecondition, NotFound
from kvrelay.gaps import CAUSES
from kvrelay.tbt.join import Joined
from kvrelay.tbt.otlp import Floats, Ints
from kvrelay.tbt.report import slowest

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    "schedule_wait": "#8c8c8c",
    "base_compute": "#4878a8",
    "batch_growth": "#8fb4d6",
    "prefill_in_step": "#d1603d",
    "kv_wait": "#7b5aa6",
    "swap_or_preemption": "#b8860b",
    "sampling": "#6aa84f",
    "host_stall": "#a61c3c",
    "delivery": "#c9c9c9",
    "slow_reader": "#e6a23c",
    "migration": "#2a2a2a",
    "unexplained": "#ff00c8",
}
DARK = frozenset({"base_compute", "kv_wait", "host_stall", "migration"})
"""Words on these are white."""
PLAIN, NEXT, PROMPT, PREEMPTING = "#8fb4d6", "#c3d7ea", "#d1603d", "#b8860b"
MAX_BARS = 4000
"""Steps or gaps that are drawn one by one: more would be less than a pixel each; the longest are kept."""


@dataclass(frozen=True, slots=True)
class Stream:
    """One stream of a request. gaps: rows in Joined.gaps; tokens: rows in Joined.tokens."""

    request: int
    sequence: int
    tokens: Ints
    gaps: Ints


def plot(joined: Joined, path: Path, request_id: str = "") -> None:
    """Write a PNG, SVG or PDF, by the ending of `path`.

    FailedPrecondition where matplotlib is missing or the file cannot be written, NotFound for a request without tokens.
    """
    stream = choose(joined, request_id)
    try:
        import matplotlib as mpl
    except ImportError:
        raise FailedPrecondition("--plot needs matplotlib: pip install 'kvrelay[plot]'", field="plot") from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, middle, bottom) = plt.subplots(
        3, 1, figsize=(12, 8.5), height_ratios=(2, 3, 1.6), layout="constrained"
    )
    middle.sharex(top)
    _timeline(top, joined, stream)
    _gaps(middle, joined, stream)
    _shares(bottom, joined)
    request = joined.recording.requests[stream.request]
    figure.suptitle(f"{request.request_id}: {len(stream.tokens)} tokens, {request.outcome or 'outcome not recorded'}")
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise FailedPrecondition(f"cannot write {path}: {error}", field="plot") from error
    finally:
        plt.close(figure)


def choose(joined: Joined, request_id: str = "") -> Stream:
    """The stream with the longest gap, of this request or of all. NotFound without one."""
    tokens, gaps = joined.tokens, joined.gaps
    wanted = np.ones(len(tokens), dtype=bool)
    if request_id:
        mine = [n for n, request in enumerate(joined.recording.requests) if request.request_id == request_id]
        wanted = np.isin(tokens.request, mine)
    if not wanted.any():
        raise NotFound(f"no tokens of request {request_id or '(any)'} were recorded", field="request")
    rows = np.flatnonzero(wanted[gaps.token])
    first = int(gaps.token[rows[np.argmax(gaps.gap_s[rows])]]) if len(rows) else int(np.flatnonzero(wanted)[0])
    request, sequence = int(tokens.request[first]), int(tokens.sequence[first])
    of_stream = (tokens.request == request) & (tokens.sequence == sequence)
    return Stream(request, sequence, np.flatnonzero(of_stream), np.flatnonzero(of_stream[gaps.token]))


def _timeline(axes: Axes, joined: Joined, stream: Stream) -> None:
    """A lane for each worker: its steps while the request lived, and the tokens where they had been written."""
    tokens, accepted = joined.tokens, joined.recording.requests[stream.request].accepted_s
    sent = tokens.sent_s[stream.tokens]
    life_of = tokens.life[stream.tokens]
    lanes = [int(life) for life in dict.fromkeys(life_of.tolist()) if life >= 0]
    for lane, life in enumerate(lanes):
        _steps(axes, joined, life, lane, accepted, (float(sent.min()), float(sent.max())))
    lane_of = np.array([lanes.index(life) if life >= 0 else 0 for life in life_of.tolist()])
    axes.scatter(sent, lane_of + 0.42, s=9, marker="|", color="black", linewidths=0.7, label="token written")
    axes.set_yticks(range(len(lanes)), [joined.lives[life][0] for life in lanes])
    axes.set_ylim(-0.5, max(1, len(lanes)) - 0.4)
    axes.legend(frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1.0), fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelbottom=False)


def _steps(
    axes: Axes, joined: Joined, life: int, lane: int, accepted_s: float | None, span: tuple[float, float]
) -> None:
    """Steps as bars on the coordinator's clock; without the moment of accept there is nothing to lay them on."""
    steps = joined.recording.steps.get(joined.lives[life])
    if steps is None or accepted_s is None:
        return
    start = steps.columns["start_s"] + steps.clock_offset_s - accepted_s
    width = np.array([record.duration_s for record in joined.records[life]])
    seen = np.flatnonzero((start + width >= min(0.0, span[0])) & (start <= span[1]))
    seen = seen[np.argsort(-width[seen])][:MAX_BARS]
    prompt = steps.columns["prefill_tokens"][seen] > 0
    gave_up = (steps.columns["preemptions"][seen] > 0) | (steps.columns["swapped_blocks"][seen] > 0)
    odd = steps.ids[seen] % 2 == 1  # neighbours in two tones: a long one shows
    kinds = (
        ("step", PLAIN, ~prompt & ~gave_up & odd),
        ("the next", NEXT, ~prompt & ~gave_up & ~odd),
        ("with prompt tokens", PROMPT, prompt & ~gave_up),
        ("that preempted or swapped", PREEMPTING, gave_up),
    )
    for label, color, which in kinds:
        rows = seen[which]
        if len(rows):
            said = label if label not in axes.get_legend_handles_labels()[1] else None
            bars = list(zip(start[rows].tolist(), width[rows].tolist(), strict=True))
            axes.broken_barh(bars, (lane - 0.3, 0.6), facecolors=color, label=said)


def _gaps(axes: Axes, joined: Joined, stream: Stream) -> None:
    """Each gap a bar that ends where its token was written, as high as it is long, and stacked by cause."""
    rows = stream.gaps
    rows = np.sort(rows[np.argsort(-joined.gaps.gap_s[rows])][:MAX_BARS])
    ends = joined.tokens.sent_s[joined.gaps.token[rows]]
    width = joined.gaps.gap_s[rows]
    below = np.zeros(len(rows))
    for cause, part in zip(CAUSES, joined.gaps.causes(rows).T * 1000.0, strict=True):
        if part.any():
            axes.bar(ends - width, part, width, below, align="edge", color=COLORS[cause.value])
        below = below + part
    axes.set_ylabel("gap, ms")
    axes.set_xlabel("seconds since the request was accepted")
    _tidy(axes)
    if len(rows):
        axes.set_ylim(0, float(below.max()) * 1.05 or 1.0)


def _shares(axes: Axes, joined: Joined) -> None:
    gaps = joined.gaps
    slow = slowest(gaps.gap_s)
    bars = {"all gaps": gaps.total(np.arange(len(gaps))), "slowest 1 %": gaps.total(slow)}
    left = np.zeros(len(bars))
    for number, cause in enumerate(CAUSES):
        part = np.array([_share(seconds, number) for seconds in bars.values()])
        if part.any():
            axes.barh(list(bars), part, left=left, color=COLORS[cause.value], label=cause.value)
            _name_parts(axes, cause.value, part, left)
        left = left + part
    axes.set_xlabel("share of their time, all requests")
    axes.set_xlim(0, 1)
    axes.invert_yaxis()
    if axes.get_legend_handles_labels()[1]:  # the colours of the panel above, too
        axes.legend(frameon=False, ncols=8, fontsize="small", loc="lower left", bbox_to_anchor=(0, 1.0))
    _tidy(axes)


def _name_parts(axes: Axes, name: str, part: Floats, left: Floats) -> None:
    ink = "white" if name in DARK else "black"
    for place, (share, begin) in enumerate(zip(part.tolist(), left.tolist(), strict=True)):
        if share > 0.08:
            axes.text(begin + share / 2, place, f"{name}\n{share:.0%}", ha="center", va="center", fontsize=8, color=ink)


def _share(seconds: Floats, cause: int) -> float:
    total = float(seconds.sum())
    return float(seconds[cause]) / total if total > 0 else 0.0


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
    axes.set_axisbelow(True)
