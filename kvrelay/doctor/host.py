"""Verdicts on a machine: processors, threads, memory, kernels, devices. Pure; measures nothing."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.doctor.finding import Finding, Verdict

OLDEST_PYTHON = (3, 11)
SHM_NEEDED_BYTES = 64 * 2**20
"""Of /dev/shm: UCX keeps queues of its connections there. Docker gives a container no more than this."""
FILES_NEEDED = 1024
FULL_MEMORY = 0.9
SLOW_BYTES_PER_S = 2e9
AGAIN = "try again when nothing else runs"
FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
"""Of a processor, those that decide which kernels run."""


@dataclass(frozen=True, slots=True)
class Cpus:
    """num_cpus: that this process may use. quota: of its control group, in CPUs, 0: none. load: of the last minute."""

    num_cpus: int
    quota: float
    load: float
    flags: frozenset[str]
    machine: str

    @property
    def usable(self) -> float:
        return min(self.num_cpus, self.quota) if self.quota else self.num_cpus


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. available: without swapping, and inside the control group's limit. shm_free None: there is no /dev/shm."""

    available: int
    shm_free: int | None
    max_files: int


@dataclass(frozen=True, slots=True)
class Need:
    """What the configured workers of this host take: compute threads and bytes of all of them together."""

    workers: int
    threads: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Kernels:
    """What computes. native: the instruction set, "" for none; detail: why. torch "": it does not import, see error.

    gpus: as torch names them. gpu_device: the kernel driver shows one. unknown: there was no time to find out.
    """

    torch: str
    error: str
    native: str
    detail: str
    linear: str
    gpus: tuple[str, ...]
    gpu_device: bool
    unknown: bool = False


def judge_python(version: tuple[int, int, int]) -> Finding:
    shown = ".".join(map(str, version))
    figures = {"version": shown}
    if version[:2] >= OLDEST_PYTHON:
        return Finding("python", Verdict.OK, shown, figures=figures)
    least = ".".join(map(str, OLDEST_PYTHON))
    return Finding("python", Verdict.PROBLEM, f"{shown} is too old", f"use Python {least} or newer", figures)


def judge_cpus(cpus: Cpus) -> Finding:
    """Old processors and busy ones are warned of: what is measured on the latter is too low."""
    present = [flag for flag in FLAGS if flag in cpus.flags]
    figures = {"cpus": cpus.num_cpus, "quota": cpus.quota, "load": cpus.load, "flags": present}
    quota = f", {cpus.quota:g} by the control group" if cpus.quota else ""
    what = f"{cpus.num_cpus} cores{quota}, {' '.join(present) or 'no vector instructions that matter'}"
    if cpus.machine in {"x86_64", "AMD64"} and "avx2" not in cpus.flags:
        advice = "use a processor with AVX2 (in a virtual machine: pass the host's model through)"
        return Finding("cpu", Verdict.WARNING, f"{what}: kernels run without vectors", advice, figures)
    if cpus.load > cpus.usable + 1:
        what += f"; load {cpus.load:.1f}, so what is measured below is too low"
        return Finding("cpu", Verdict.WARNING, what, "end what else runs here, then measure again", figures)
    return Finding("cpu", Verdict.OK, what, figures=figures)


def judge_threads(cpus: Cpus, need: Need) -> Finding:
    """More compute threads than cores make every step wait for the slowest of them."""
    figures = {"threads": need.threads, "workers": need.workers, "usable": cpus.usable}
    what = f"{need.threads} compute threads of {need.workers} workers on {cpus.usable:g} cores"
    best = max(1, int(cpus.usable // need.workers))
    if need.threads > cpus.usable:
        advice = f"--threads {best}, or fewer workers on this host"
        return Finding("threads", Verdict.WARNING, f"{what}: they wait for each other", advice, figures)
    advice = f"--threads {best} would use all cores" if best * need.workers > need.threads else ""
    return Finding("threads", Verdict.OK, what, advice, figures)


def judge_memory(memory: Memory, need: Need) -> Finding:
    figures = {"available_bytes": memory.available, "needed_bytes": need.num_bytes}
    what = f"{_gb(memory.available)} free, {need.workers} workers take {_gb(need.num_bytes)}"
    if need.num_bytes > memory.available:
        advice = "lower --pool-mb or --swap-mb, start fewer workers, or free memory"
        return Finding("memory", Verdict.PROBLEM, f"{what}: too little", advice, figures)
    if need.num_bytes > FULL_MEMORY * memory.available:
        return Finding("memory", Verdict.WARNING, f"{what}: hardly enough", "lower --pool-mb or --swap-mb", figures)
    return Finding("memory", Verdict.OK, what, figures=figures)


def judge_shm(memory: Memory) -> Finding:
    figures = {"free_bytes": memory.shm_free}
    if memory.shm_free is None:
        return Finding("/dev/shm", Verdict.WARNING, "is not there: NIXL may fail", "mount a tmpfs on /dev/shm", figures)
    what = f"{_gb(memory.shm_free)} free"
    if memory.shm_free < SHM_NEEDED_BYTES:
        advice = "empty it or make it larger (in containers: --shm-size=1g)"
        return Finding("/dev/shm", Verdict.WARNING, f"{what}: NIXL may fail", advice, figures)
    return Finding("/dev/shm", Verdict.OK, what, figures=figures)


def judge_files(memory: Memory) -> Finding:
    figures = {"max_files": memory.max_files}
    what = f"{memory.max_files:,} open files allowed"
    if memory.max_files < FILES_NEEDED:
        advice = f"ulimit -n {FILES_NEEDED} or more"
        return Finding("files", Verdict.WARNING, f"{what}: many clients need more", advice, figures)
    return Finding("files", Verdict.OK, what, figures=figures)


def judge_kernels(kernels: Kernels, executor: str) -> Finding:
    """Without torch nothing serves a model; without our kernels it is slow."""
    figures = {"torch": kernels.torch, "native": kernels.native, "linear": kernels.linear}
    if kernels.unknown:
        return Finding("kernels", Verdict.WARNING, f"not looked at: {kernels.error}", AGAIN, figures)
    if not kernels.torch:
        needed = executor == "torch"
        what = f"torch does not import: {kernels.error}"
        advice = "pip install 'kvrelay[worker]'; hosts of coordinators alone need no torch"
        return Finding("kernels", Verdict.PROBLEM if needed else Verdict.WARNING, what, advice, figures)
    what = f"torch {kernels.torch}, {kernels.detail}, linear layers by {kernels.linear}"
    if not kernels.native and not kernels.gpus:
        advice = "see the reason; with a C++ compiler: python -m engine.native.build"
        return Finding("kernels", Verdict.WARNING, f"{what}: slow without them", advice, figures)
    if kernels.linear == "torch" and not kernels.gpus:
        return Finding("kernels", Verdict.WARNING, f"{what}: slow", "unset KVRELAY_LINEAR", figures)
    return Finding("kernels", Verdict.OK, what, figures=figures)


def judge_gpus(kernels: Kernels) -> Finding:
    figures = {"gpus": list(kernels.gpus)}
    if kernels.gpus:
        return Finding("gpu", Verdict.OK, f"{len(kernels.gpus)}: {', '.join(kernels.gpus)}", figures=figures)
    if kernels.unknown:
        return Finding("gpu", Verdict.WARNING, f"not looked at: {kernels.error}", AGAIN, figures)
    if kernels.gpu_device and kernels.torch:
        advice = "install a torch build for this driver's CUDA version"
        return Finding("gpu", Verdict.WARNING, "there is one and torch does not see it", advice, figures)
    return Finding("gpu", Verdict.OK, "none; the processor computes", figures=figures)


def judge_bandwidth(one_thread: float, all_threads: float, weight_bytes: int) -> Finding:
    """Bytes a second that are read. weight_bytes 0: no model to say something about."""
    figures = {"one_thread_bytes_per_s": one_thread, "all_cores_bytes_per_s": all_threads}
    what = f"{one_thread / 1e9:.1f} GB/s by one thread, {all_threads / 1e9:.1f} by all cores"
    if weight_bytes:
        most = max(one_thread, all_threads) / weight_bytes  # a busy machine may give all of them less than one
        figures["most_tokens_per_s"] = most
        what += f": one stream gets {most:.0f} tokens/s at most"
    if one_thread < SLOW_BYTES_PER_S:
        advice = "look for what else runs here, or for a frequency limit"
        return Finding("bandwidth", Verdict.WARNING, f"{what}: slow", advice, figures)
    return Finding("bandwidth", Verdict.OK, what, figures=figures)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB"
