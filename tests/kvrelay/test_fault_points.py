"""Fault points: orders from the environment, their count, their proof."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay import fault_points
from kvrelay.fault_points import FaultInjected, fault_point

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def nobody_else() -> Iterator[None]:
    yield
    fault_points.install(None)


def test_a_point_does_nothing_without_an_order() -> None:
    fault_points.obey({})
    fault_point("decode.landed")


def test_an_order_is_carried_out_at_the_nth_passage_and_leaves_proof(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    fault_points.obey({"KVRELAY_FAULT_POINT": "decode.landed:raise:3", "KVRELAY_FAULT_PROOF": str(proof)})
    fault_point("decode.landed")
    fault_point("decode.step")
    fault_point("decode.landed")
    assert not proof.exists()
    with pytest.raises(FaultInjected, match=r"decode\.landed"):
        fault_point("decode.landed")
    assert proof.read_text().split()[1:] == ["decode.landed", "raise"]
    fault_point("decode.landed")


def test_kill_ends_the_process_at_once(tmp_path: Path) -> None:
    code = "import os; from kvrelay.fault_points import *; obey(os.environ); fault_point('decode.step'); print(1)"
    env = {"KVRELAY_FAULT_POINT": "decode.step:kill", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (-9, b"")


@pytest.mark.parametrize("order", ["nowhere:kill:1", "decode.landed:explode:1", "decode.landed:kill:x"])
def test_an_order_that_cannot_be_meant_is_an_error(order: str) -> None:
    with pytest.raises(ValueError, match="KVRELAY_FAULT_POINT"):
        fault_points.obey({"KVRELAY_FAULT_POINT": order})


def test_every_name_is_a_place_in_the_code() -> None:
    packages = ("kvrelay", "coordinator", "worker", "prefill_svc", "decode_svc", "kvtransfer")
    sources = (path.read_text() for package in packages for path in (ROOT / package).rglob("*.py"))
    used = {name for source in sources for name in re.findall(r'fault_point\("([a-z.0-9]+)"\)', source)}
    assert used == fault_points.NAMES
