"""The coordinator as a process: signals, exit codes, and the trace of a request."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.fake_workers import FakeWorker

from coordinator.main import Coordinator
from coordinator.model_facts import load_model
from kvrelay.config import CoordinatorConfig
from kvrelay.requests import Role
from kvrelay.rpc.channel import open_channel
from kvrelay.session import Reserve
from kvrelay.telemetry.tracing import Tracing
from kvrelay.v1 import inference_pb2, inference_pb2_grpc

PROGRAM = """
import sys
from coordinator.main import run_coordinator
from kvrelay.config import CoordinatorConfig
config = CoordinatorConfig(listen=sys.argv[1], executor=sys.argv[2], model="/no/such/model")
sys.exit(run_coordinator(config, lambda address: print(address, flush=True)))
"""


async def start(listen: str, executor: str = "hash") -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, listen, executor, stdout=pipe, stderr=pipe
    )


async def test_a_terminated_coordinator_exits_0_and_says_only_its_address() -> None:
    process = await start("127.0.0.1:0")
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), 20)).decode().strip()
    assert line.startswith("127.0.0.1:")
    assert not line.endswith(":0")
    process.send_signal(signal.SIGTERM)
    out, _ = await asyncio.wait_for(process.communicate(), 10)
    assert (process.returncode, out) == (0, b"")


async def test_a_port_in_use_exits_1_and_a_missing_model_78_each_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for process, words, code in (
            (await start(address), f"cannot listen on {address}: ", 1),
            (await start("127.0.0.1:0", "torch"), "/no/such/model", 78),
        ):
            out, err = await asyncio.wait_for(process.communicate(), 20)
            assert (process.returncode, out) == (code, b"")
            assert words in err.decode()


async def sessions_with(coordinator: Coordinator, workers: int) -> None:
    while len(coordinator.roster.listing()) < workers:  # noqa: ASYNC110  # nobody else needs to be told
        await asyncio.sleep(0.01)


async def test_the_trace_of_a_request_has_a_span_for_each_part_of_its_life() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    config = CoordinatorConfig(listen="127.0.0.1:0", executor="hash")
    coordinator = Coordinator(config, load_model(config), Tracing(provider, True))
    address = await coordinator.start()
    async with (
        open_channel(address) as channel,
        FakeWorker(Role.PREFILL, "p0") as prefill,
        FakeWorker(Role.DECODE, "d0") as decode,
    ):
        await prefill.announce_to(address)
        await decode.announce_to(address)
        async with asyncio.timeout(5):
            await sessions_with(coordinator, 2)
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        request = inference_pb2.GenerateRequest(text="hello", max_tokens=4)
        async for _ in stub.Generate(request, metadata=[("traceparent", caller)]):
            pass
        await coordinator.stop(1.0)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    root = spans.pop("kvrelay.v1.InferenceService/Generate")
    chunk = spans.pop("prefill.chunk")
    assert chunk.parent is not None
    assert chunk.parent.span_id == spans["prefill"].context.span_id
    assert sorted(spans) == ["decode", "kv.push", "place", "prefill", "queue", "reserve"]
    assert all(span.parent is not None and span.parent.span_id == root.context.span_id for span in spans.values())
    assert f"{root.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    sent = decode.commands(Reserve)[0].work.traceparent
    assert sent == f"00-{root.context.trace_id:032x}-{root.context.span_id:016x}-01"
    assert root.attributes is not None
    assert root.attributes["gen_ai.usage.output_tokens"] == 4
    assert root.attributes["kvrelay.request.outcome"] == "length"
    for span in spans.values():
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= span.end_time
