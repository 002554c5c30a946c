"""bench/kills.py judges as strictly as it says: what fails a run, and how kills are shared out."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.history import Tally


@pytest.fixture(scope="module")
def kills() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kills", Path(__file__).parents[2] / "bench" / "kills.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["kills"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_run_passes_with_one_stream_in_a_hundred_unavailable(kills: ModuleType) -> None:
    assert kills.Outcome(tally=Tally(exact=99, unavailable=1)).passed


@pytest.mark.parametrize(
    "broken",
    [
        {"tally": Tally(exact=198, unavailable=3)},
        {"tally": Tally(exact=100, violations=("s: wrong",))},
        {"unproven": ["process 1 ended, and was no worker"]},
        {"leaks": ["d0: 1 blocks held"]},
    ],
)
def test_anything_else_fails_it(kills: ModuleType, broken: dict[str, object]) -> None:
    assert not kills.Outcome(**broken).passed


def test_the_default_figure_is_160_kills_with_the_hash_executor_and_40_with_the_model(
    kills: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kills, "ModelReference", lambda cases, dtype: None)
    args = argparse.Namespace(
        prefill=100,
        decode=100,
        model_kills=40,
        transport="nixl",
        dtype="bfloat16",
        concurrency=8,
        model_concurrency=6,
        seed=1,
    )
    counted = [(s.name, r.count("prefill"), r.count("decode")) for s, r in kills.settings(args)]
    assert counted == [("hash", 80, 80), ("smollm2-135m-instruct bfloat16", 20, 20)]
