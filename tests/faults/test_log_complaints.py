"""What a misused event loop writes into its process's log is found there: every cluster of the tests is held to it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.cluster import complaints_in

WAYS = {
    "was never awaited": "asyncio.sleep(0)",
    "was never retrieved": "asyncio.create_task(fail()); await asyncio.sleep(0.01)",
    "was destroyed but it is pending": (
        "loop = asyncio.new_event_loop(); task = loop.create_task(asyncio.sleep(9)); loop.close(); del task"
    ),
    "Exception in callback": "asyncio.get_running_loop().call_soon(int, 'x'); await asyncio.sleep(0.01)",
}
SCRIPT = """
import asyncio, gc
async def fail():
    raise BlockingIOError
async def main():
    {way}
asyncio.run(main())
gc.collect()
"""


@pytest.mark.parametrize("words", WAYS)
def test_what_asyncio_complains_of_is_found(words: str) -> None:
    way = SCRIPT.format(way=WAYS[words])
    done = subprocess.run([sys.executable, "-c", way], capture_output=True, text=True, timeout=30, check=True)
    assert any(words in line for line in complaints_in(done.stderr)), done.stderr


def test_what_a_process_says_of_its_work_is_no_complaint() -> None:
    assert complaints_in("[info] worker up worker=p0\n[warning] worker lost why='Cancelling all calls'\n") == []
