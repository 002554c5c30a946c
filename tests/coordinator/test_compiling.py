"""The process that compiles constraints: what ends it, what that is held against, and who waits for it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

import coordinator.compiling as compiling_module
import coordinator.trial_process as process_module
from coordinator.compiling import Compiling
from coordinator.constraints import Constraint, ConstraintKind, compile_grammar
from coordinator.text import ByteCodec, Tokenizing
from kvrelay.errors import InvalidArgument, ResourceExhausted, Unavailable, Unimplemented

ENDLESS = Constraint(ConstraintKind.JSON_SCHEMA, '{"type":"integer","multipleOf":1000003}')


def regex(pattern: str) -> Constraint:
    return Constraint(ConstraintKind.REGEX, pattern)


@pytest.fixture
async def compiling() -> AsyncIterator[Compiling]:
    one = Compiling("")
    yield one
    one.close()


async def pid_of(compiling: Compiling) -> int:
    """Of its process, which has begun."""
    await compiling.grammar(regex("begin"))
    pid = compiling._trials.pid
    assert pid is not None
    return pid


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


async def killed(pid: int, number: signal.Signals) -> None:
    """Until it is dead, and still to be waited for."""
    os.kill(pid, number)
    await asyncio.to_thread(os.waitid, os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def compiled(monkeypatch: pytest.MonkeyPatch, compiling: Compiling) -> list[str]:
    """The texts that reach the process, from now on."""
    texts: list[str] = []
    compile = compiling._trials.compile

    def noted(constraint: Constraint) -> str:
        texts.append(constraint.text)
        return compile(constraint)

    monkeypatch.setattr(compiling._trials, "compile", noted)
    return texts


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
async def test_a_process_that_was_ended_while_idle_is_replaced_and_leaves_nothing(
    compiling: Compiling, number: signal.Signals
) -> None:
    pid = await pid_of(compiling)
    process = compiling._trials._process
    assert process is not None
    await killed(pid, number)
    assert await compiling.grammar(regex("[0-9]{3}")) == compile_grammar(regex("[0-9]{3}"))
    assert process.returncode == -number, "waited for: no zombie"
    assert process.stdin.closed and process.stdout.closed


async def test_a_process_that_dies_while_it_is_written_to_is_not_ended_by_that_constraint(
    compiling: Compiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = await pid_of(compiling)
    process = compiling._trials._process
    assert process is not None
    await killed(pid, signal.SIGSEGV)
    polls = iter([None])
    poll = process.poll
    monkeypatch.setattr(process, "poll", lambda: next(polls, poll()))  # alive when it was looked at
    assert json.loads(await compiling.grammar(regex("[0-9]{4}")))


async def test_a_process_that_an_operator_ends_takes_no_constraint_with_it(compiling: Compiling) -> None:
    pid = await pid_of(compiling)
    os.kill(pid, signal.SIGSTOP)
    asked = asyncio.ensure_future(compiling.grammar(regex("[0-9]{5}")))
    await until(lambda: compiling._wanted[regex("[0-9]{5}")].begun if compiling._wanted else False)
    os.kill(pid, signal.SIGKILL)
    assert await asked == compile_grammar(regex("[0-9]{5}"))


async def test_a_constraint_whose_processes_were_ended_twice_is_unavailable_and_not_remembered(
    compiling: Compiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pid_of(compiling)
    monkeypatch.setattr(process_module, "MAX_WAIT_S", 0.0)  # the second is ended too, before it can begin
    with pytest.raises(Unavailable, match=r"^the process that compiles grammars ended with -9") as refused:
        await compiling.grammar(ENDLESS)
    assert refused.value.retryable
    monkeypatch.undo()
    with pytest.raises(InvalidArgument, match="more than 1 s of processor time"):
        await compiling.grammar(ENDLESS)


async def test_a_process_that_does_not_start_is_unavailable(
    compiling: Compiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(Unavailable, match="does not start: No such file or directory"):
        await compiling.grammar(regex("a"))
    monkeypatch.undo()
    assert json.loads(await compiling.grammar(regex("a")))


async def test_equal_constraints_at_a_time_are_compiled_once(
    compiling: Compiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = compiled(monkeypatch, compiling)
    outcomes = await asyncio.gather(*[compiling.grammar(regex("[0-9]{6}")) for _ in range(100)])
    assert set(outcomes) == {compile_grammar(regex("[0-9]{6}"))}
    refusals = await asyncio.gather(*[compiling.grammar(ENDLESS) for _ in range(100)], return_exceptions=True)
    assert {str(refusal) for refusal in refusals} == {"json_schema: takes more than 1 s of processor time to compile"}
    assert len({id(refusal) for refusal in refusals}) == 100
    assert texts == ["[0-9]{6}", ENDLESS.text]


async def test_who_waits_for_a_constraint_is_counted_though_it_is_one_constraint(
    compiling: Compiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling_module, "MAX_ASKING", 3)
    asked = [asyncio.ensure_future(compiling.grammar(regex("[0-9]{9}"))) for _ in range(3)]
    await asyncio.sleep(0)  # all of them wait
    with pytest.raises(ResourceExhausted, match="3 requests wait for their grammars") as refused:
        await compiling.grammar(regex("[0-9]{9}"))
    assert refused.value.retry_after_s == 1.0
    asked.pop().cancel()
    await asyncio.sleep(0)
    assert json.loads(await compiling.grammar(regex("[0-9]{9}"))), "one has left, another may come"
    assert len({await one for one in asked}) == 1


async def test_what_was_begun_is_remembered_though_who_asked_has_gone(
    compiling: Compiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = compiled(monkeypatch, compiling)
    first, second = [asyncio.ensure_future(compiling.grammar(regex("[0-9]{7}"))) for _ in range(2)]
    await until(lambda: texts == ["[0-9]{7}"])
    first.cancel()
    assert json.loads(await second), "one who leaves takes nothing from the other"
    alone = asyncio.ensure_future(compiling.grammar(regex("[0-9]{8}")))
    await until(lambda: texts == ["[0-9]{7}", "[0-9]{8}"])
    alone.cancel()
    await until(lambda: not compiling._wanted)
    assert json.loads(await compiling.grammar(regex("[0-9]{8}")))
    assert texts == ["[0-9]{7}", "[0-9]{8}"]


async def test_what_nobody_waits_for_any_more_is_not_begun_and_not_counted(
    compiling: Compiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = await pid_of(compiling)
    texts = compiled(monkeypatch, compiling)
    os.kill(pid, signal.SIGSTOP)
    asked = [asyncio.ensure_future(compiling.grammar(regex(f"{i}"))) for i in range(9)]
    await until(lambda: texts == ["0"])
    for one in asked:
        one.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    assert [one.text for one in compiling._wanted] == ["0"]
    later = asyncio.ensure_future(compiling.grammar(regex("b")))
    os.kill(pid, signal.SIGCONT)
    assert json.loads(await later)
    assert texts == ["0", "b"]


async def test_a_tokenizer_that_cannot_be_read_means_no_constraints_and_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling = Compiling(str(tmp_path))
    for pattern in ("a", "b"):
        with pytest.raises(Unimplemented, match=r"no constraints with this model: .*config\.json"):
            await compiling.grammar(regex(pattern))
        assert compiling._trials.pid is None
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
    compiling.close()


async def test_closing_ends_the_process_and_what_it_was_doing() -> None:
    tokenizing = Tokenizing(ByteCodec())
    pid = await pid_of(tokenizing._compiling)
    process = tokenizing._compiling._trials._process
    assert process is not None
    os.kill(pid, signal.SIGSTOP)
    asked = [asyncio.ensure_future(tokenizing.grammar(regex(f"{i}"))) for i in range(3)]
    await until(lambda: len(tokenizing._compiling._wanted) == 3)
    tokenizing.close()
    assert process.returncode == -signal.SIGKILL
    refusals = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(refusal) for refusal in refusals] == [Unavailable] * 3
    with pytest.raises(Unavailable, match="shutting down"):
        await tokenizing.grammar(regex("b"))


async def test_a_process_that_is_just_starting_is_ended_too() -> None:
    compiling = Compiling("")
    asked = asyncio.ensure_future(compiling.grammar(regex("a")))
    await until(lambda: compiling._trials.pid is not None)
    process = compiling._trials._process
    compiling.close()
    assert process is not None and process.returncode == -signal.SIGKILL
    with pytest.raises(Unavailable):
        await asked
