from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc
from kvrelay.rpc.process import settle
made = [[i] for i in range(1000)]
settle()
print(gc.get_freeze_count() > 1000, len(gc.get_objects()) < 1000)
"""


def test_what_start_up_made_is_out_of_the_collectors_sight() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "True True\n"
