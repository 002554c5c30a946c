"""`kvrelay health` against a server of this process and against nobody."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator

import pytest
from typer.testing import CliRunner

from kvrelay.cli import health
from kvrelay.cli.app import app
from kvrelay.rpc.server import RpcServer


@pytest.fixture
async def served() -> AsyncIterator[tuple[RpcServer, str]]:
    server = RpcServer()
    server.services.append("a.Service")
    port = server.bind("127.0.0.1:0")
    await server.start()
    yield server, f"127.0.0.1:{port}"
    await server.stop(0)


async def ask(*arguments: str) -> int:
    import asyncio

    return await asyncio.to_thread(health.run_health, arguments)


async def test_a_process_that_serves_is_well(served, capsys):
    _, target = served
    assert await ask(target) == 0
    assert capsys.readouterr().out == "SERVING\n"


async def test_a_service_that_is_not_ready_is_not_well_and_then_is(served, capsys):
    server, target = served
    assert await ask(target, "--service", "a.Service", "--json") == 1
    told = {"target": target, "service": "a.Service", "status": "NOT_SERVING"}
    assert json.loads(capsys.readouterr().out) == told
    await server.set_ready(True)
    assert await ask(target, "--service", "a.Service", "--json") == 0
    assert json.loads(capsys.readouterr().out) == told | {"status": "SERVING"}


async def test_a_service_that_there_is_not_is_named(served, capsys):
    _, target = served
    assert await ask(target, "--service", "b.Service") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "b.Service" in err


async def test_nobody_there_is_an_error_as_json_on_stderr(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        target = f"127.0.0.1:{taken.getsockname()[1]}"
    assert await ask(target, "--json") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert json.loads(err)["error"]["code"] in ("UNAVAILABLE", "DEADLINE_EXCEEDED")


def test_help_has_an_example_and_the_application_lists_the_command(capsys):
    with pytest.raises(SystemExit) as ended:
        health.build_parser().parse_args(["--help"])
    assert ended.value.code == 0
    assert "Example: kvrelay health" in capsys.readouterr().out
    assert "health" in CliRunner().invoke(app, ["--help"]).output
