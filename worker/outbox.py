"""Collects what an engine turn has to say, one report per session. Pure: no clocks, no sockets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from kvrelay.blocks import BlockEvents
from kvrelay.requests import SessionId
from kvrelay.session import (
    ComputeRecord,
    Ended,
    Landed,
    Load,
    Pushed,
    Refused,
    Report,
    Reserved,
    TokenOut,
)
from kvrelay.steps import StepRecord

Item = Reserved | Refused | TokenOut | Landed | Pushed | ComputeRecord | Ended | BlockEvents


@dataclass(slots=True)
class _Page:
    due: bool = False
    items: dict[type[Item], list[Item]] = field(default_factory=lambda: defaultdict(list))


class Outbox:
    """Items posted for sessions that have closed are dropped: nobody is left to read them."""

    def __init__(self) -> None:
        self._pages: dict[SessionId, _Page] = {}

    def open(self, session: SessionId) -> None:
        self._pages[session] = _Page()

    def close(self, session: SessionId) -> None:
        self._pages.pop(session, None)

    def is_open(self, session: SessionId) -> bool:
        return session in self._pages

    def add(self, session: SessionId, item: Item) -> None:
        page = self._pages.get(session)
        if page is not None:
            page.items[type(item)].append(item)

    def tell_all(self) -> None:
        """Every session gets a report next, if only for the load in it."""
        for page in self._pages.values():
            page.due = True

    def speaking(self) -> list[SessionId]:
        """Sessions that get a report next: what is added for them now goes with it."""
        return [session for session, page in self._pages.items() if page.items or page.due]

    def drain(
        self,
        step_id: int,
        now: float,
        load: Load,
        steps_for: Callable[[SessionId], tuple[StepRecord, ...]] = lambda _: (),
    ) -> list[tuple[SessionId, Report]]:
        """A report for every session that has something to hear; items keep their order within each kind.

        steps_for: the steps that a session has not heard of; the tokens are those of the last one.
        """
        reports = []
        for session, page in self._pages.items():
            if not page.items and not page.due:
                continue
            page.due = False
            taken, page.items = page.items, defaultdict(list)
            steps = steps_for(session)
            reports.append(
                (
                    session,
                    Report(
                        step_id=step_id,
                        sent_at_s=now,
                        reserved=tuple(taken[Reserved]),  # type: ignore[arg-type]  # keyed by their own type
                        refused=tuple(taken[Refused]),  # type: ignore[arg-type]
                        tokens=tuple(taken[TokenOut]),  # type: ignore[arg-type]
                        landed=tuple(taken[Landed]),  # type: ignore[arg-type]
                        pushed=tuple(taken[Pushed]),  # type: ignore[arg-type]
                        records=tuple(taken[ComputeRecord]),  # type: ignore[arg-type]
                        ended=tuple(taken[Ended]),  # type: ignore[arg-type]
                        load=load,
                        block_events=tuple(taken[BlockEvents]),  # type: ignore[arg-type]
                        steps=steps,
                        step_tokens=(*(0,) * (len(steps) - 1), len(taken[TokenOut])) if steps else (),
                    ),
                )
            )
        return reports
