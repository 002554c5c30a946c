"""Ends this process when the process that started it ends, however that ended. Knows nothing else.

On Linux the kernel sends SIGKILL; elsewhere a thread looks at the parent's id twice a second. Both are asked for with
the flag --die-with-parent, so that a worker somebody starts by hand outlives its shell.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1
POLL_S = 0.5


def die_with_parent(parent_pid: int) -> None:
    """Bind this process's life to `parent_pid`, who must be its parent. Call it before anything slow."""
    if not (sys.platform == "linux" and _ask_kernel()):
        threading.Thread(target=_watch, args=(parent_pid,), name="parent-watch", daemon=True).start()
    if os.getppid() != parent_pid:  # it ended before the kernel was asked
        os._exit(1)


def _ask_kernel() -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0)


def _watch(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)
