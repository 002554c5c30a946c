"""What the doctor says of configuration, model and port."""

from __future__ import annotations

from kvrelay.doctor.finding import Verdict
from kvrelay.doctor.settings import judge_config, judge_model, judge_port

OK, WARNING, PROBLEM = Verdict


def test_a_wrong_key_is_named_with_where_it_stands() -> None:
    assert judge_config("", 0, "", "").what == "no file, 0 KVRELAY_* variables"
    assert judge_config("k.toml", 2, "", "").what == "k.toml, 2 KVRELAY_* variables"
    of_file = judge_config("k.toml", 0, "worker.thread is not a known setting", "worker.thread")
    assert (of_file.verdict, of_file.advice) == (PROBLEM, "correct worker.thread in the file")
    of_environment = judge_config("k.toml", 1, "KVRELAY_THREAD is not a known setting", "KVRELAY_THREAD")
    assert of_environment.advice == "correct KVRELAY_THREAD in the environment"


def test_a_model_must_be_there_if_one_is_needed() -> None:
    assert judge_model("m", "hash", "", "").what == "none needed by the hash executor"
    assert judge_model("m", "torch", "/models/m", "").what == "m in /models/m"
    missing = judge_model("m", "torch", "", "m has not been pulled; run: kvrelay models pull m")
    assert (missing.verdict, missing.advice) == (PROBLEM, "")
    assert judge_model("x", "torch", "", "no such model").advice == "kvrelay models list shows what can be pulled"


def test_a_port_is_free_or_ours_or_a_problem() -> None:
    assert judge_port("h:1", "", coordinator=False).what == "h:1 is free"
    assert judge_port("h:1", "in use", coordinator=True).what == "a coordinator serves on h:1"
    taken = judge_port("h:1", "cannot listen on h:1: in use", coordinator=False)
    assert (taken.verdict, taken.what) == (PROBLEM, "cannot listen on h:1: in use, and no coordinator answers there")
