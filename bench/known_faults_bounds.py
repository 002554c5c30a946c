"""Known faults of bounds: waits that do not end, and what hangs or fails without anybody noticing."""

from __future__ import annotations

from known_fault import Edit, Fault, one_edit

DISPATCH = "coordinator/dispatch.py"
_LANDED = "            self._feed_all(landed.request_id, ev.LandedAt(worker, landed.attempt))\n"
_WHY = "before the tokens: on a slow line one report may bring it and the whole answer"

BOUNDS_FAULTS: tuple[Fault, ...] = (
    one_edit(
        "half-cut-link-refuses-the-next",
        "a writer that dials anew is refused for as long as decode has not seen its older link fail",
        "worker/link_server.py",
        "        self._end_older(writer)\n",
        """        if writer in self._links:
            raise FailedPrecondition(f"{hello.worker_id} has a link already", field="link.hello.incarnation")
""",
    ),
    one_edit(
        "full-link-tries-each-part",
        "what waits behind a part that a full link did not take is tried for as long again, one part after another",
        "kvtransfer/transports/grpc.py",
        "                self._num_hopeless = self._parts.qsize()\n",
        "                pass\n",
    ),
    one_edit(
        "hung-transport-is-well",
        "a worker whose transport's thread hangs counts as well, and gets hand-offs that cannot land",
        "worker/health.py",
        "not hangs and not transport_hangs and ",
        "not hangs and ",
    ),
    one_edit(
        "stuck-prefill-is-waited-for",
        "requests wait for a prefill worker that was given up as stuck and has a session again",
        "coordinator/roster.py",
        "worker in leaving or self._stuck.is_given_up(load.description)\n",
        "worker in leaving\n",
    ),
    one_edit(
        "a-bug-holds-the-line",
        "a request that the router raises for holds up all behind it",
        "coordinator/placing.py",
        """                self._end_who_raised(now)
                continue
""",
        "                return\n",
    ),
    Fault(
        "landed-after-tokens",
        "a report that brings landed with the whole answer is read tokens first: the hand-off is in no trace",
        (
            Edit(DISPATCH, f"        for landed in report.landed:  # {_WHY}\n{_LANDED}", ""),
            Edit(
                DISPATCH,
                "        for pushed in report.pushed:\n",
                f"        for landed in report.landed:\n{_LANDED}        for pushed in report.pushed:\n",
            ),
        ),
    ),
)
