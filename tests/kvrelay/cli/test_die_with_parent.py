import os
import signal
import subprocess
import sys
import time

import pytest

CHILD = """
import os, time
from kvrelay.cli import parent
{patch}
parent.die_with_parent(os.getppid())
print(os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
time.sleep(60)
"""


def gone(pid, within_s):
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        with open(f"/proc/{pid}/stat") as stat:
            if stat.read().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        time.sleep(0.02)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("patch", ["", "parent._ask_kernel = lambda: False"], ids=["kernel", "watcher thread"])
def test_a_child_ends_when_its_parent_is_killed(patch):
    code = CHILD.format(patch=patch)
    with subprocess.Popen([sys.executable, "-c", PARENT, code], stdout=subprocess.PIPE, text=True) as process:
        try:
            child = int(process.stdout.readline())
            assert not gone(child, 0.0)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=5)
        assert gone(child, 5.0)


def test_a_child_whose_parent_is_already_gone_ends_at_once():
    code = "from kvrelay.cli import parent; parent.die_with_parent(1 << 30); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (1, "")
