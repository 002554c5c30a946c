"""What to do when a process of a local cluster ends. Pure: knows neither processes nor clocks."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace

from kvrelay.cli.problems import EXIT_CONFIG

STEADY_S = 10.0
"""A process that lived this long was healthy: its next death is the first of a new row."""
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 15.0
START_TRIES = 3
"""Deaths in a row after which a process that never served ends the whole start."""


@dataclass(frozen=True, slots=True)
class Life:
    """What is remembered of a process over its incarnations. quick_deaths: in a row, each before STEADY_S."""

    name: str
    quick_deaths: int = 0
    incarnations: int = 0


@dataclass(frozen=True, slots=True)
class Restart:
    delay_s: float
    message: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The cluster ends with exit code `code` and this message."""

    code: int
    message: str


Decision = Restart | GiveUp


def started(life: Life) -> Life:
    return replace(life, incarnations=life.incarnations + 1)


def on_exit(life: Life, code: int, lived_s: float, cluster_served: bool, last_line: str = "") -> tuple[Life, Decision]:
    """The process ended by itself with `code` (negative: that signal) after `lived_s`.

    The first death restarts at once, the next ones in a row after 0.5, 1, 2 ... 15 s. A configuration error is final,
    and so are START_TRIES deaths in a row before the cluster ever served. Who was told to go (`kvrelay drain`) did not
    die: it is started again at once.
    """
    how = describe_exit(code)
    why = f": {reason_in(last_line)}" if last_line and code >= 0 else ""  # who was killed had no time to say why
    if code == EXIT_CONFIG:
        return life, GiveUp(EXIT_CONFIG, f"{life.name} cannot be configured{why}")
    if code == 0 and cluster_served and lived_s >= FIRST_DELAY_S:
        message = f"{life.name} went after {lived_s:.1f} s; starting incarnation {life.incarnations + 1} now"
        return life, Restart(0.0, message)
    deaths = 1 if lived_s >= STEADY_S else life.quick_deaths + 1
    life = replace(life, quick_deaths=deaths)
    if deaths >= START_TRIES and not cluster_served:
        return life, GiveUp(1, f"{life.name} ended {deaths} times before it served ({how}){why}")
    delay = 0.0 if deaths == 1 else min(FIRST_DELAY_S * 2.0 ** (deaths - 2), LONGEST_DELAY_S)
    when = f"in {delay:g} s" if delay else "now"
    message = (
        f"{life.name} ended after {lived_s:.1f} s ({how}){why}; starting incarnation {life.incarnations + 1} {when}"
    )
    return life, Restart(delay, message)


def reason_in(line: str) -> str:
    """What a process's last line says went wrong: of one of our log lines what stands under `why`, else all of it."""
    why = re.search(r"\[error *\].* why=(?:(?P<quote>['\"])(?P<text>.*?)(?P=quote)|(?P<word>\S+))(?= |$)", line)
    return (why["text"] if why["quote"] else why["word"]) if why else line


def describe_exit(code: int) -> str:
    """Exit code as words; negative codes are signals."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
