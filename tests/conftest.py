"""For every test: the state of signals that the processes under test inherit."""

from __future__ import annotations

import signal

# A shell that runs the tests in the background has SIGINT ignored, and so would everything that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
