"""Ten times more requests than a cluster can serve: are they refused quickly, and is the rest served as well as ever?

    python bench/overload.py                              30 s of overload, the hash executor with steps of 10 ms
    python bench/overload.py --seconds 5                  a short one
    python bench/overload.py --model smollm2-135m-instruct --seconds 30

1. best: a closed loop that keeps every row busy; its goodput is the best, and 1x.
2. normal: an open loop of half that rate; its times to first token are the normal ones.
3. overload: an open loop of --times that rate, answers refused or served.
4. after: the normal load again, at once; when is it normal?
5. best again, in the same cluster.
Every answer is compared with that of one process (hash) or with the same request asked alone (model). Exit 1 when a
bound is broken. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from overload_client import Outcome
from overload_figures import NORMAL_WINDOW_S, NORMAL_WITHIN_S, Phase, judge
from running import Running, cpu_s_of, percentile, running, until_quiet

from kvrelay.client import AsyncClient

SAMPLE_S = 0.1
LINE_BYTES = 2**28
"""All outcomes of a phase come as one line."""

Case = tuple[list[int], list[int]]


class Clients:
    """Client processes. Each gets its share of every order."""

    def __init__(self, processes: list[asyncio.subprocess.Process]) -> None:
        self._processes = processes

    @classmethod
    async def start(cls, stack: AsyncExitStack, count: int, target: str, cases: Sequence[Case]) -> Clients:
        program = str(Path(__file__).with_name("overload_client.py"))
        processes = []
        for _ in range(count):
            process = await asyncio.create_subprocess_exec(
                sys.executable, program, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=LINE_BYTES
            )
            stack.push_async_callback(_end, process)
            processes.append(process)
        clients = cls(processes)
        await asyncio.gather(*(clients._set_up(p, {"target": target, "cases": cases}) for p in processes))
        return clients

    async def _set_up(self, process: asyncio.subprocess.Process, words: dict[str, Any]) -> None:
        assert process.stdout is not None
        await self._tell(process, words)
        if await process.stdout.readline() != b"ready\n":
            raise SystemExit("a client process did not start")

    async def run(self, orders: Sequence[dict[str, Any]]) -> list[Outcome]:
        answers = await asyncio.gather(*(self._ask(p, o) for p, o in zip(self._processes, orders, strict=True)))
        return [Outcome(*row) for answer in answers for row in answer]

    def cpu_s(self) -> float:
        return sum(cpu_s_of(process.pid) for process in self._processes)

    @staticmethod
    async def _tell(process: asyncio.subprocess.Process, words: dict[str, Any]) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(words).encode() + b"\n")
        await process.stdin.drain()

    async def _ask(self, process: asyncio.subprocess.Process, order: dict[str, Any]) -> list[list[Any]]:
        assert process.stdout is not None
        await self._tell(process, order)
        line = await process.stdout.readline()
        if not line:
            raise SystemExit("a client process died")
        answer: list[list[Any]] = json.loads(line)
        return answer


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()


class Bench:
    """One cluster, its clients, and the phases in order."""

    def __init__(self, cluster: Running, clients: Clients, admin: AsyncClient, arguments: argparse.Namespace) -> None:
        self._cluster, self._clients, self._admin = cluster, clients, admin
        self._arguments = arguments

    async def closed(self, name: str, seconds: float) -> Phase:
        n = self._arguments.clients
        each = max(1, round(2 * self._arguments.max_sequences / n))
        now = time.monotonic()
        phase = Phase(name, now, now + seconds)
        order = {"mode": "closed", "concurrency": each, "until": phase.until}
        return await self._run(phase, [order] * n)

    async def open(self, name: str, seconds: float, rate: float) -> Phase:
        n = self._arguments.clients
        begin = time.monotonic()
        phase = Phase(name, begin, begin + seconds)
        order = {"mode": "open", "rate": rate / n, "begin": begin, "until": phase.until}
        return await self._run(phase, [{**order, "seed": seed} for seed in range(n)])

    async def _run(self, phase: Phase, orders: Sequence[dict[str, Any]]) -> Phase:
        watching = asyncio.create_task(self._watch(phase))
        used, began = self._cpu_s(), time.monotonic()
        try:
            phase.outcomes = await self._clients.run(orders)
            seconds = time.monotonic() - began
            phase.cores = {name: (cpu_s - used[name]) / seconds for name, cpu_s in self._cpu_s().items()}
        finally:
            watching.cancel()
            (end,) = await asyncio.gather(watching, return_exceptions=True)
        if isinstance(end, Exception):
            raise end
        say(f"{phase.name:10} {_line(phase)}")
        return phase

    def _cpu_s(self) -> dict[str, float]:
        return {**self._cluster.cpu_s(), "clients": self._clients.cpu_s()}

    async def _watch(self, phase: Phase) -> None:
        while True:
            topology = await self._admin.topology()
            phase.queued.append(topology["queued_requests"])
            phase.opened.append(topology["open_requests"])
            for name, mib in self._cluster.rss_mib().items():
                phase.rss_mib[name] = max(mib, phase.rss_mib.get(name, 0.0))
            await asyncio.sleep(SAMPLE_S)


def _line(phase: Phase) -> str:
    words = Counter(o.status if o.status != "OK" or o.exact else "WRONG" for o in phase.outcomes)
    counts = ", ".join(f"{count} {word}" for word, count in words.most_common())
    return f"{phase.goodput:7.1f} exact/s, TTFT p50 {percentile(phase.ttft_ms(), 0.5):.0f} ms; {counts}"


def cases_of(arguments: argparse.Namespace) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(256) for _ in range(arguments.prompt_tokens)] for _ in range(arguments.cases)]


def hash_answers(prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    """What one process gives for each prompt, without any split."""
    from engine.block_pool import BlockPool
    from engine.budgets import Budgets
    from engine.hash_executor import HashExecutor
    from engine.local import LocalEngine
    from engine.scheduler import Scheduler
    from kvrelay.models.builtin import BUILTIN_EOS, BUILTIN_VOCAB
    from kvrelay.requests import RequestId, Sampling, SequenceKey, SequenceSpec, SessionId, StopRule

    executor = HashExecutor(256, 16, BUILTIN_VOCAB, BUILTIN_EOS)
    try:
        answers = []
        for number, prompt in enumerate(prompts):
            engine = LocalEngine(executor, Scheduler(BlockPool(256), 16, Budgets()))
            key = SequenceKey(SessionId("bench"), RequestId(str(number)), 1)
            spec = SequenceSpec(key, tuple(prompt), len(prompt), Sampling(temperature=0.0), StopRule(max_tokens))
            answers.append(engine.generate([spec])[key])
        return [list(answer) for answer in answers]
    finally:
        executor.close()


async def alone(admin: AsyncClient, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    """Each prompt asked while nothing else runs."""
    options = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    return [list((await admin.generate(p, **options).collect()).token_ids) for p in prompts]  # type: ignore[arg-type]  # of many types


async def measure(cluster: Running, arguments: argparse.Namespace) -> dict[str, Phase]:
    prompts, phases = cases_of(arguments), {}
    async with AsyncExitStack() as stack:
        admin = await stack.enter_async_context(AsyncClient(cluster.target))
        expected = await alone(admin, prompts, arguments.output_tokens)
        if not arguments.model and expected != hash_answers(prompts, arguments.output_tokens):
            raise SystemExit("an idle cluster already answers wrongly")
        cases = list(zip(prompts, expected, strict=True))
        clients = await Clients.start(stack, arguments.clients, cluster.target, cases)
        bench = Bench(cluster, clients, admin, arguments)
        short = arguments.normal_seconds
        phases["best"] = await bench.closed("best", short)
        rate = phases["best"].goodput
        if not rate:
            raise SystemExit("the cluster answers nothing")
        phases["normal"] = await bench.open("normal", short, rate / 2)
        phases["overload"] = await bench.open("overload", arguments.seconds, rate * arguments.times)
        phases["after"] = await bench.open("after", max(short, NORMAL_WITHIN_S + NORMAL_WINDOW_S), rate / 2)
        phases["best again"] = await bench.closed("best again", short)
    return phases


def flags_of(arguments: argparse.Namespace) -> list[str]:
    flags = ["--transport", arguments.transport, "--max-sequences", str(arguments.max_sequences)]
    if arguments.model:
        return [*flags, "--executor", "torch", "--model", arguments.model, "--threads", "1"]
    step = str(arguments.step_seconds)
    return [*flags, "--executor", "hash", "--step-seconds", step, "--num-blocks", "512"]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="length of the overload (default 30)")
    parser.add_argument("--normal-seconds", type=float, default=0.0, help="of each other phase (default: a third)")
    parser.add_argument("--times", type=float, default=10.0, help="offered load as a multiple of the best goodput")
    parser.add_argument("--model", default="", help="a real model instead of the hash executor")
    parser.add_argument("--transport", default="nixl", choices=("nixl", "grpc"))
    parser.add_argument("--step-seconds", type=float, default=0.01, help="how long a step of the hash executor takes")
    parser.add_argument("--max-sequences", type=int, default=8, help="rows of a batch")
    parser.add_argument("--queue-limit", type=int, default=32, help="requests that may wait at the coordinator")
    parser.add_argument("--prompt-tokens", type=int, default=24)
    parser.add_argument("--output-tokens", type=int, default=24)
    parser.add_argument("--cases", type=int, default=16, help="different prompts")
    parser.add_argument("--clients", type=int, default=2, help="client processes")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON on stdout")
    arguments = parser.parse_args(argv)
    arguments.normal_seconds = arguments.normal_seconds or max(4.0, arguments.seconds / 3)
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    env = {"KVRELAY_QUEUE_LIMIT": str(arguments.queue_limit)}
    with (
        tempfile.TemporaryDirectory() as directory,
        running(flags_of(arguments), env, Path(directory) / "log") as cluster,
    ):
        phases = asyncio.run(measure(cluster, arguments))
        quiet, _ = until_quiet(cluster.target)
    figures = judge(phases, quiet, arguments.queue_limit)
    if arguments.json:
        print(json.dumps({"settings": vars(arguments), **figures}, indent=2))
    else:
        print("\n".join(f"{name:26} {_short(value)}" for name, value in figures.items() if name != "broken"))
    for what in figures["broken"]:
        say(f"BROKEN: {what}")
    return 1 if figures["broken"] else 0


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(one)}" for key, one in value.items())
    return " / ".join(map(_short, value)) if isinstance(value, list) else str(value)


if __name__ == "__main__":
    sys.exit(main())
