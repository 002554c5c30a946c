"""Constraints to grammars, one after another, in a process beside this one. Knows no requests.

What was compiled before is remembered, also that it could not be: most clients send one schema again and again. Those
who ask for one constraint at a time share what comes of it, and what nobody waits for any more is not begun.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from coordinator.constraints import Constraint, check_constraint
from coordinator.trial_process import TrialProcess
from kvrelay.errors import InvalidArgument, KVRelayError, ResourceExhausted, Unavailable

MAX_WAITING = 32
"""Constraints, the one that is being compiled among them."""
MAX_ASKING = 1024
"""Requests that wait for any of them; each may hold a prompt of several MB, and is not open yet."""
MAX_REMEMBERED = 256
"""Of at most 64 KiB each, and their grammars."""

Outcome = str | KVRelayError


@dataclass(slots=True)
class _Wanted:
    """A constraint that is to be compiled. outcome: of all who asked for it."""

    outcome: asyncio.Future[Outcome]
    askers: int = 0
    begun: bool = False


class Compiling:
    """Owns a thread and, from the first constraint on, a process; `close` ends both. Used from one loop."""

    def __init__(self, directory: str) -> None:
        """directory: where the model's tokenizer lies; empty: tokens are bytes."""
        self._closed = False
        self._trials = TrialProcess(directory)
        self._known: OrderedDict[Constraint, str | InvalidArgument] = OrderedDict()
        self._wanted: dict[Constraint, _Wanted] = {}
        """As they came: the first one is being compiled."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")

    async def grammar(self, constraint: Constraint) -> str:
        """What Sampling.grammar takes. InvalidArgument names the field; Unimplemented: not with this tokenizer.

        ResourceExhausted when too many of them, or too many requests, wait; Unavailable: it is not known whether it
        can be compiled.
        """
        check_constraint(constraint)
        outcome: Outcome | None = self._known.get(constraint)
        if outcome is None:
            outcome = await self._compiled(constraint)
        else:
            self._known.move_to_end(constraint)
        if isinstance(outcome, KVRelayError):  # a new one for each who asked: an exception keeps where it was raised
            raise type(outcome)(outcome.message, field=outcome.field, retry_after_s=outcome.retry_after_s)
        return outcome

    def close(self) -> None:
        """What is being compiled, or waits for it, is Unavailable. Takes as long as a process takes to be killed."""
        if self._closed:
            return
        self._closed = True
        self._trials.stop()
        for wanted in self._wanted.values():
            if not wanted.begun:
                wanted.outcome.set_result(Unavailable("shutting down"))
        self._thread.submit(self._trials.end)
        self._thread.shutdown()

    async def _compiled(self, constraint: Constraint) -> Outcome:
        if sum(wanted.askers for wanted in self._wanted.values()) >= MAX_ASKING:
            raise ResourceExhausted(f"{MAX_ASKING} requests wait for their grammars", retry_after_s=1.0)
        wanted = self._wanted.get(constraint)
        if wanted is None:
            wanted = self._want(constraint)
        wanted.askers += 1
        try:
            return await asyncio.shield(wanted.outcome)
        finally:
            wanted.askers -= 1
            if not wanted.askers and not wanted.begun:
                self._wanted.pop(constraint, None)

    def _want(self, constraint: Constraint) -> _Wanted:
        if self._closed:
            raise Unavailable("shutting down")
        if len(self._wanted) >= MAX_WAITING:
            raise ResourceExhausted(f"{MAX_WAITING} grammars wait to be compiled", retry_after_s=1.0)
        wanted = self._wanted[constraint] = _Wanted(asyncio.get_running_loop().create_future())
        if len(self._wanted) == 1:
            self._begin()
        return wanted

    def _begin(self) -> None:
        """The one that waits for longest."""
        if self._closed or not self._wanted:
            return
        constraint, wanted = next(iter(self._wanted.items()))
        wanted.begun = True
        job = asyncio.get_running_loop().run_in_executor(self._thread, self._try, constraint)
        job.add_done_callback(partial(self._ended, constraint))

    def _try(self, constraint: Constraint) -> Outcome:
        try:
            return self._trials.compile(constraint)
        except KVRelayError as error:
            return error

    def _ended(self, constraint: Constraint, job: asyncio.Future[Outcome]) -> None:
        """Whoever asked for it may have gone: it is remembered all the same."""
        wanted = self._wanted.pop(constraint)
        error = job.exception()
        if error is not None:
            wanted.outcome.set_exception(error)
        else:
            outcome = job.result()
            if isinstance(outcome, str | InvalidArgument):
                self._remember(constraint, outcome)
            wanted.outcome.set_result(outcome)
        self._begin()

    def _remember(self, constraint: Constraint, outcome: str | InvalidArgument) -> None:
        self._known[constraint] = outcome
        if len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)
