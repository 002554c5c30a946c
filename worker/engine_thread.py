"""The engine thread: takes events, plans, runs, applies, hands actions out. It waits for nothing but its mailbox.

It takes everything from the mailbox (waiting only when there is nothing to compute, and never past the next timer) and
makes one turn of it (engine_turn), with the computing in the middle.

Any exception ends the process: a dead engine thread must never look like an idle one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog

from engine.executor import Executor
from engine.plan import Plan
from kvrelay.session import Load
from worker.engine_turn import EngineTurn
from worker.events import Action, Core, Event
from worker.mailbox import Mailbox

SLOW_TURN_S = 1.5
"""Near a third of a lease: from here on renewals come late. Said in the log, since it explains what follows."""

log = structlog.get_logger("worker.engine")


class EngineThread:
    """Owns the core and the executor. `deliver` gets the actions of a turn; it must not block."""

    def __init__(
        self,
        build: Callable[[], tuple[Core, Executor]],
        mailbox: Mailbox[Event],
        deliver: Callable[[list[Action]], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._build = build
        self._mailbox = mailbox
        self._deliver = deliver
        self._on_death = on_death
        self._built = threading.Event()
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._core: Core | None = None
        self.progress_at = time.monotonic()
        """When the thread last finished a turn; a step that hangs lets it grow old."""
        self.load: Load | None = None
        """As of the last turn: an immutable value that other threads may read."""
        self.stuck_s = 0.0
        """As of the last turn: how long nothing has moved although there was work."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, timeout_s: float) -> Core:
        """Start the thread and wait until core and executor are built; raises what building them raised."""
        self._thread.start()
        if not self._built.wait(timeout_s):
            raise TimeoutError(f"the engine was not ready within {timeout_s:.0f} s")
        if self._failure is not None:
            raise self._failure
        assert self._core is not None
        return self._core

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread after its current step."""
        self._stopping.set()
        self._mailbox.close()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._core, executor = self._build()
            self.load = self._core.load(time.monotonic())
        except BaseException as error:
            self._failure = error
            self._built.set()
            return
        self._built.set()
        try:
            self._loop(self._core, executor)
        except BaseException as error:
            self._on_death(error)
        finally:
            executor.close()

    def _loop(self, core: Core, executor: Executor) -> None:
        turn = EngineTurn(core, self._deliver, time.monotonic)
        busy = False
        while not self._stopping.is_set():
            events = self._mailbox.take(turn.patience(busy))
            begun_at = time.monotonic()
            plan = turn.begin(events)
            if plan is not None:
                run_at = time.monotonic()
                result = executor.run(plan)
                ran_s = time.monotonic() - run_at
                turn.finish(plan, result)
                if time.monotonic() - begun_at > SLOW_TURN_S:
                    self._say_slow(plan, len(events), time.monotonic() - begun_at, ran_s)
            busy = plan is not None
            self.progress_at = time.monotonic()
            self.load = core.load(self.progress_at)
            self.stuck_s = core.stuck_s(self.progress_at)

    @staticmethod
    def _say_slow(plan: Plan, num_events: int, turn_s: float, ran_s: float) -> None:
        log.warning(
            "slow turn: leases and cancels wait for it",
            seconds=round(turn_s, 3),
            computing=round(ran_s, 3),
            sequences=len(plan.slices),
            tokens=plan.num_tokens,
            events=num_events,
        )
