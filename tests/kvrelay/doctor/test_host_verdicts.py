"""What the doctor says of a machine, for every kind of fact."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.doctor.finding import Finding, Verdict, worst
from kvrelay.doctor.host import (
    Cpus,
    Kernels,
    Memory,
    Need,
    judge_bandwidth,
    judge_cpus,
    judge_files,
    judge_gpus,
    judge_kernels,
    judge_memory,
    judge_python,
    judge_shm,
    judge_threads,
)

OK, WARNING, PROBLEM = Verdict
GB = 10**9
CPUS = Cpus(num_cpus=8, quota=0.0, load=0.5, flags=frozenset({"avx2", "sse2", "avx512f"}), machine="x86_64")
MEMORY = Memory(available=16 * GB, shm_free=8 * GB, max_files=20_000)
NEED = Need(workers=2, threads=8, num_bytes=4 * GB)
KERNELS = Kernels("2.13.0", "", "avx2", "native kernels: avx2", "native", (), gpu_device=False)


def said(finding: Finding) -> tuple[Verdict, str, str]:
    return finding.verdict, finding.what, finding.advice


def test_the_worst_finding_decides() -> None:
    good, odd, bad = (Finding("x", verdict, "") for verdict in Verdict)
    assert worst([]) is OK
    assert worst([good, odd, good]) is WARNING
    assert worst([bad, odd, good]) is PROBLEM


def test_python_before_3_11_is_a_problem() -> None:
    assert said(judge_python((3, 11, 7))) == (OK, "3.11.7", "")
    assert said(judge_python((3, 10, 1))) == (PROBLEM, "3.10.1 is too old", "use Python 3.11 or newer")


def test_cores_are_told_with_the_instructions_that_matter() -> None:
    assert said(judge_cpus(CPUS)) == (OK, "8 cores, avx2 avx512f", "")
    assert judge_cpus(replace(CPUS, quota=2.5)).what == "8 cores, 2.5 by the control group, avx2 avx512f"
    old = judge_cpus(replace(CPUS, flags=frozenset({"sse2"})))
    assert old.verdict is WARNING
    assert old.what == "8 cores, no vector instructions that matter: kernels run without vectors"
    assert judge_cpus(replace(CPUS, flags=frozenset({"asimd"}), machine="aarch64")).verdict is OK


def test_a_busy_machine_is_warned_of_by_its_load_on_the_cores_it_may_use() -> None:
    assert judge_cpus(replace(CPUS, load=9.0)).verdict is OK
    busy = judge_cpus(replace(CPUS, load=9.1))
    assert busy.verdict is WARNING
    assert busy.what.endswith("load 9.1, so what is measured below is too low")
    assert judge_cpus(replace(CPUS, load=4.0, quota=2.0)).verdict is WARNING


def test_more_threads_than_cores_are_warned_of_and_fewer_are_told() -> None:
    assert said(judge_threads(CPUS, NEED)) == (OK, "8 compute threads of 2 workers on 8 cores", "")
    assert said(judge_threads(CPUS, replace(NEED, threads=2))) == (
        OK,
        "2 compute threads of 2 workers on 8 cores",
        "--threads 4 would use all cores",
    )
    assert said(judge_threads(CPUS, replace(NEED, threads=16))) == (
        WARNING,
        "16 compute threads of 2 workers on 8 cores: they wait for each other",
        "--threads 4, or fewer workers on this host",
    )
    assert judge_threads(replace(CPUS, quota=1.0), replace(NEED, threads=2)).advice.startswith("--threads 1,")


@pytest.mark.parametrize(
    ("needed", "verdict", "what"),
    [
        (14 * GB, OK, "16 GB free, 2 workers take 14 GB"),
        (15 * GB, WARNING, "16 GB free, 2 workers take 15 GB: hardly enough"),
        (17 * GB, PROBLEM, "16 GB free, 2 workers take 17 GB: too little"),
    ],
)
def test_memory_must_hold_all_workers(needed: int, verdict: Verdict, what: str) -> None:
    finding = judge_memory(MEMORY, replace(NEED, num_bytes=needed))
    assert (finding.verdict, finding.what) == (verdict, what)
    assert finding.figures == {"available_bytes": 16 * GB, "needed_bytes": needed}


def test_too_small_a_shm_and_none_are_warned_of() -> None:
    assert said(judge_shm(MEMORY)) == (OK, "8 GB free", "")
    assert judge_shm(replace(MEMORY, shm_free=64 * 2**20)).verdict is OK
    small = judge_shm(replace(MEMORY, shm_free=10**6))
    assert said(small) == (
        WARNING,
        "0.001 GB free: NIXL may fail",
        "empty it or make it larger (in containers: --shm-size=1g)",
    )
    assert judge_shm(replace(MEMORY, shm_free=None)).verdict is WARNING


def test_few_open_files_are_warned_of() -> None:
    assert judge_files(MEMORY).what == "20,000 open files allowed"
    assert judge_files(replace(MEMORY, max_files=256)).verdict is WARNING


def test_kernels_are_named_and_missing_ones_warned_of() -> None:
    fine = judge_kernels(KERNELS, "torch")
    assert said(fine) == (OK, "torch 2.13.0, native kernels: avx2, linear layers by native", "")
    missing = replace(KERNELS, native="", detail="no native kernels: no C++ compiler", linear="torch")
    assert judge_kernels(missing, "torch").verdict is WARNING
    assert judge_kernels(replace(missing, gpus=("H200",)), "torch").verdict is OK
    forced = judge_kernels(replace(KERNELS, linear="torch"), "torch")
    assert (forced.verdict, forced.advice) == (WARNING, "unset KVRELAY_LINEAR")


def test_no_torch_is_a_problem_only_for_the_executor_that_needs_it() -> None:
    none = Kernels("", "No module named 'torch'", "", "", "", (), gpu_device=False)
    assert judge_kernels(none, "torch").verdict is PROBLEM
    assert judge_kernels(none, "hash").verdict is WARNING
    late = judge_kernels(replace(none, error="no result within 5 s", unknown=True), "torch")
    assert (late.verdict, late.what) == (WARNING, "not looked at: no result within 5 s")


def test_a_gpu_that_torch_does_not_see_is_warned_of() -> None:
    assert judge_gpus(KERNELS).what == "none; the processor computes"
    assert judge_gpus(replace(KERNELS, gpus=("NVIDIA H200",), gpu_device=True)).what == "1: NVIDIA H200"
    unseen = judge_gpus(replace(KERNELS, gpu_device=True))
    assert (unseen.verdict, unseen.what) == (WARNING, "there is one and torch does not see it")
    assert judge_gpus(replace(KERNELS, torch="", gpu_device=True)).verdict is OK
    assert judge_gpus(replace(KERNELS, torch="", error="late", unknown=True)).what == "not looked at: late"


def test_bandwidth_says_what_one_stream_gets_at_most() -> None:
    finding = judge_bandwidth(11.8e9, 20e9, 200_000_000)
    assert said(finding) == (
        OK,
        "11.8 GB/s by one thread, 20.0 by all cores: one stream gets 100 tokens/s at most",
        "",
    )
    assert finding.figures["most_tokens_per_s"] == 100.0
    assert judge_bandwidth(11.8e9, 20e9, 0).what == "11.8 GB/s by one thread, 20.0 by all cores"
    assert judge_bandwidth(1.9e9, 20e9, 0).verdict is WARNING
