"""Decode's pool holds one and a half prompts: nobody waits for ever, and nobody is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.golden import Case
from support.injections import crowded
from support.members import Members, members
from support.recorder import History, Judge, Recorder
from support.streams import prompt_of

pytestmark = pytest.mark.e2e

PROMPT, NEED = 300, 19
"""Tokens, and the blocks of 16 for them and the first token; the pool has 30."""


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[Members]:
    """Two coordinators that know nothing of each other, so that decode is asked for more than it has."""
    common = ("--transport", "nixl", "--step-tokens", "64")
    own = {"p0": ("--num-blocks", "64"), "d0": ("--num-blocks", "30", "--step-seconds", "0.003")}
    with members(tmp_path, prefill=1, decode=1, coordinators=2, common=common, flags=own) as cluster:
        yield cluster


async def test_prompts_that_fill_decodes_pool_wait_their_turn(narrow: Members, verdict: Judge) -> None:
    """8 at once, then 30; chunks of 64 tokens, so that prefill pushes while decode is full."""
    history = History()
    first, second = (Recorder(c.address, history) for c in narrow.coordinators)
    async with first, second:
        for num_prompts in (8, 30):
            cases = [Case(prompt_of(PROMPT, s), 40, s if s % 2 else None) for s in range(num_prompts)]
            asking = [(first, second)[i % 2].ask(case, deadline_s=40.0) for i, case in enumerate(cases)]
            with crowded(narrow.view, "d0", NEED, history.faults):
                await asyncio.gather(*asking)
    assert verdict(history).exact == 38
    await asyncio.to_thread(narrow.until_quiet)
