"""python -m sim: runs seeds, says what was found, exits 1 on a violation."""

from __future__ import annotations

import sys

from sim.command import main

if __name__ == "__main__":
    sys.exit(main())
