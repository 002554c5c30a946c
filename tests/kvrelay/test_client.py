"""Both clients against a small server in this process: tokens, results, errors, leaving early, deadlines."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import threading
import time

import pytest
from support.served import Served

from kvrelay import client as kv
from kvrelay import errors
from kvrelay.cli.ask import ask_cluster
from kvrelay.client.fold import StreamFold
from kvrelay.client.request import generate_request
from kvrelay.v1 import admin_pb2, admin_pb2_grpc, common_pb2, inference_pb2_grpc, model_pb2, model_pb2_grpc
from kvrelay.v1 import inference_pb2 as pb


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    """Says `max_tokens` tokens; the prompt's text may ask for trouble."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.left = threading.Event()
        self.told, self.was_told = threading.Event(), False

    async def Generate(self, request, context):
        self.requests.append(request)
        if request.text == "refuse":
            raise errors.ResourceExhausted("full", field="prompt", retry_after_s=0.5)
        yield pb.GenerateResponse(accepted=pb.Accepted(request_id="r1", prompt_tokens=3, seed=2**63, model="m"))
        try:
            for index in range(request.max_tokens):
                yield pb.GenerateResponse(
                    token=pb.Token(index=index, token_id=100 + index, text=f"t{index} ", offset_s=0.1)
                )
                if request.text in ("endless", "silent"):
                    await asyncio.sleep(0.01 if request.text == "endless" else 30)
            if request.text == "uneven":
                yield finish_of(1, text="tail")
                self.was_told = await asyncio.to_thread(self.told.wait, 5)
                raise errors.Internal("boom")
            if request.text == "break":
                raise errors.Unavailable("worker d1 was lost")
            if request.text == "cancel":
                raise errors.Cancelled("drained")
            if request.text == "cut":
                return
            yield pb.GenerateResponse(finished=self.finish(request))
        except (asyncio.CancelledError, GeneratorExit):
            self.left.set()
            raise

    def finish(self, request):
        return pb.Finished(
            reason=common_pb2.FINISH_REASON_LENGTH,
            text="end",
            usage=pb.Usage(prompt_tokens=3, completion_tokens=request.max_tokens, cached_tokens=1),
            prefill_worker="p1",
            decode_worker="d1",
            hand_off=pb.HandOff(transport="nixl", num_blocks=2, num_bytes=64, seconds=0.5, exposed_s=0.25),
            migrations=2,
        )

    async def Tokenize(self, request, context):
        return pb.TokenizeResponse(token_ids=map(ord, request.text))

    async def Detokenize(self, request, context):
        if request.model == "other":
            raise errors.NotFound("no model 'other'", field="model")
        return pb.DetokenizeResponse(text="".join(map(chr, request.token_ids)))


LIMITS = {
    "max_logit_bias": 1024,
    "max_logprobs": 20,
    "max_grammar_bytes": 65536,
    "max_text_bytes": 9,
    "max_token_ids": 8,
}


class Models(model_pb2_grpc.ModelServiceServicer):
    async def ListModels(self, request, context):
        return model_pb2.ListModelsResponse(model_ids=["m"])

    async def GetModel(self, request, context):
        identity = common_pb2.ModelIdentity(model_id="m", fingerprint="f", vocab_size=9)
        return model_pb2.GetModelResponse(
            identity=identity, context_limit=64, eos_token_ids=[2], chat_template=True, **LIMITS
        )


class Admin(admin_pb2_grpc.AdminServiceServicer):
    async def GetTopology(self, request, context):
        about = common_pb2.WorkerDescription(worker_id="d1", role=common_pb2.ROLE_DECODE, incarnation="i", pid=7)
        counts = common_pb2.BlockCounts(total=8, free=5, held=1, cached=1, reserved=1)
        load = common_pb2.Load(blocks=counts, running=2, waiting=1, transfers_in_flight=3, tokens_per_s=4.5)
        load.counters["forced"] = 2
        worker = admin_pb2.WorkerStatus(description=about, load=load, silent_s=0.25)
        return admin_pb2.GetTopologyResponse(workers=[worker], coordinator_id="c", open_requests=2)

    async def DrainWorker(self, request, context):
        raise errors.Unimplemented("drain is not built yet", field="worker_id")


@pytest.fixture
def serving():
    served = Served(Inference(), Models(), Admin())
    yield served
    served.close()


class Synchronous:
    """The sync client with the async one's face, so that one test serves both."""

    def __init__(self, target: str) -> None:
        self.client = kv.Client(target)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        self.client.close()

    def generate(self, *args, **options):
        return SynchronousStream(self.client.generate(*args, **options))

    def __getattr__(self, name):
        async def call(*args, **options):
            return getattr(self.client, name)(*args, **options)

        return call


class SynchronousStream:
    def __init__(self, stream) -> None:
        self.stream = stream

    async def __aiter__(self):
        iterator = iter(self.stream)
        try:
            while (event := await asyncio.to_thread(next, iterator, None)) is not None:
                yield event
        finally:
            iterator.close()

    async def __aenter__(self):
        self.stream.__enter__()
        return self

    async def __aexit__(self, *problem):
        self.stream.__exit__(*problem)

    def __getattr__(self, name):
        return getattr(self.stream, name)


@pytest.fixture(params=[kv.AsyncClient, Synchronous])
async def client(request, serving):
    async with request.param(serving.target) as opened:
        yield opened


async def test_a_stream_yields_its_tokens_and_then_has_a_result(client):
    stream = client.generate("hi", max_tokens=3)
    events = [event async for event in stream]
    assert [(e.index, e.token_id, e.text, e.offset_s) for e in events] == [
        (0, 100, "t0 ", 0.1),
        (1, 101, "t1 ", 0.1),
        (2, 102, "t2 ", 0.1),
    ]
    result = stream.result
    times = [event.received_s for event in events]
    assert times == sorted(times)
    assert (result.request_id, result.token_ids, result.text, result.tail) == (
        "r1",
        (100, 101, 102),
        "t0 t1 t2 end",
        "end",
    )
    assert (result.finish_reason, result.seed, result.model) == ("length", 2**63, "m")
    (only,) = result.choices
    assert (only.sequence, only.token_ids, only.text, only.hand_off) == (
        0,
        result.token_ids,
        result.text,
        result.hand_off,
    )
    assert stream.choices == [only]
    assert result.usage == kv.Usage(3, 3, 1)
    assert result.hand_off == kv.HandOff("nixl", 2, 64, 0.5, 0.25)
    assert (result.prefill_worker, result.decode_worker, result.migrations) == ("p1", "d1", 2)
    assert result.ttft_ms == times[0] * 1000
    assert result.gaps_ms == pytest.approx(((times[1] - times[0]) * 1000, (times[2] - times[1]) * 1000))


async def test_options_reach_the_server_and_absent_ones_stay_absent(client, serving):
    async for _ in client.generate(
        [1, 2, 3],
        max_tokens=1,
        temperature=0.0,
        top_p=0.5,
        top_k=4,
        seed=2**64 - 1,
        stop=["a", "b"],
        stop_token_ids=[7],
        ignore_eos=True,
        model="m",
        request_label="mine",
    ):
        pass
    async for _ in client.generate([{"role": "user", "content": "hi"}], max_tokens=1, stop="one"):
        pass
    full, bare = serving.inference.requests
    expected = pb.GenerateRequest(
        tokens=pb.TokenIds(ids=[1, 2, 3]),
        sampling=common_pb2.SamplingParams(temperature=0.0, top_p=0.5, top_k=4, seed=2**64 - 1),
        max_tokens=1,
        stop=["a", "b"],
        stop_token_ids=[7],
        ignore_eos=True,
        model="m",
        client_request_id="mine",
    )
    assert full == expected
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
    assert bare == pb.GenerateRequest(chat=chat, max_tokens=1, stop=["one"])


async def test_a_refusal_is_our_error_with_its_field_and_retry_time(client):
    with pytest.raises(errors.ResourceExhausted, match="full") as caught:
        await anext(aiter(client.generate("refuse")))
    assert (caught.value.field, caught.value.retry_after_s) == ("prompt", 0.5)


@pytest.mark.parametrize(
    ("text", "kind"), [("break", errors.Unavailable), ("cancel", errors.Cancelled), ("cut", errors.Internal)]
)
async def test_a_stream_that_breaks_raises_after_its_tokens_and_has_no_result(client, text, kind):
    stream = client.generate(text, max_tokens=2)
    with pytest.raises(kind):
        _ = [event async for event in stream]
    assert [event.index for event in stream.tokens] == [0, 1]
    with pytest.raises(errors.Internal, match="no result: 2 tokens came"):
        _ = stream.result


async def test_leaving_the_loop_cancels_the_call_at_the_server(client, serving):
    async for event in client.generate("endless", max_tokens=10_000):
        if event.index == 2:
            break
    assert await asyncio.to_thread(serving.inference.left.wait, 5)


async def test_leaving_the_with_block_cancels_the_call_at_the_server(client, serving):
    async with client.generate("endless", max_tokens=10_000) as stream:
        iterator = aiter(stream)
        assert (await anext(iterator)).index == 0
    assert await asyncio.to_thread(serving.inference.left.wait, 5)
    with pytest.raises(errors.Cancelled):
        async for _ in iterator:
            pass


async def test_cancelling_the_reading_task_stays_a_cancellation(serving):
    async with kv.AsyncClient(serving.target) as client:
        stream = client.generate("silent", max_tokens=2)
        task = asyncio.create_task(stream.collect())
        async with asyncio.timeout(5):
            while not stream.tokens:  # noqa: ASYNC110  # tokens come without an event
                await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(serving.inference.left.wait, 5)


async def test_a_deadline_ends_the_stream_on_both_sides(client, serving):
    began = time.monotonic()
    with pytest.raises(errors.DeadlineExceeded):
        async for _ in client.generate("silent", max_tokens=2, deadline_s=0.3):
            pass
    assert 0.25 < time.monotonic() - began < 2.0
    assert await asyncio.to_thread(serving.inference.left.wait, 5)


async def test_no_server_is_unavailable_at_once():
    server_less = "127.0.0.1:9"
    async with kv.AsyncClient(server_less) as client:
        with pytest.raises(errors.Unavailable):
            await client.topology()
    with kv.Client(server_less) as client, pytest.raises(errors.Unavailable):
        client.generate("hi").collect()


async def test_topology_is_a_dict_for_a_status_command(client):
    topology = await client.topology()
    (worker,) = topology["workers"]
    blocks = {"total": 8, "free": 5, "held": 1, "cached": 1, "reserved": 1, "quarantined": 0}
    expected = {
        "id": "d1",
        "role": "decode",
        "incarnation": "i",
        "pid": 7,
        "blocks": blocks,
        "running": 2,
        "waiting": 1,
    }
    assert {key: worker[key] for key in expected} == expected
    assert (worker["transfers_in_flight"], worker["tokens_per_s"], worker["silent_s"]) == (3, 4.5, 0.25)
    assert worker["counters"] == {"forced": 2}
    assert (topology["coordinator_id"], topology["open_requests"]) == ("c", 2)


async def test_the_small_calls_answer_and_map_errors(client):
    assert await client.tokenize("ab") == [97, 98]
    assert await client.detokenize([97, 98]) == "ab"
    assert await client.list_models() == ["m"]
    info = await client.get_model()
    assert (info.model_id, info.context_limit, info.eos_token_ids, info.chat_template) == ("m", 64, (2,), True)
    assert {name: getattr(info, name) for name in LIMITS} == LIMITS
    with pytest.raises(errors.NotFound) as caught:
        await client.detokenize([1], model="other")
    assert caught.value.field == "model"
    with pytest.raises(errors.Unimplemented):
        await client.drain_worker("d1")


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ([2**63], {}, "tokens.ids"),
        (["a"], {}, "tokens.ids"),
        ("\ud800", {}, "text"),
        ([{"role": "user"}, 7], {}, "chat.messages[1]"),
        ([{"role": 7}], {}, "chat.messages[0].role"),
        ("a", {"seed": -1}, "sampling.seed"),
        ("a", {"temperature": "hot"}, "sampling.temperature"),
        ("a", {"max_tokens": 2**63}, "max_tokens"),
        ("a", {"stop": [1]}, "stop"),
        ("a", {"stop_token_ids": [1.5]}, "stop_token_ids"),
        ("a", {"min_p": "some"}, "sampling.min_p"),
        ("a", {"logit_bias": {7: "much"}}, "sampling.logit_bias[7]"),
        ("a", {"logit_bias": {2**63: 1.0}}, f"sampling.logit_bias[{2**63}]"),
        ("a", {"priority": "high"}, "priority"),
        ("a", {"regex": "a", "ebnf": "b"}, "ebnf"),
        ("a", {"choice": ["a"], "json_schema": {}}, "choice"),
        ("a", {"choice": ["a", 1]}, "choice.texts"),
        ("a", {"json_schema": {"enum": [{1}]}}, "json_schema"),
        ("a", {"tools": [{"type": "function"}]}, "chat.tools_json"),
        ([1], {"template_variables": {"x": 1}}, "chat.template_json"),
        ([{"role": "user", "content": "a", "n": math.nan}], {}, "chat.messages[0]"),
        ([{"role": "user", "content": ["part"]}], {}, "chat.messages[0].content"),
    ],
)
def test_what_does_not_fit_the_wire_is_refused_by_name(prompt, options, field):
    with pytest.raises(errors.InvalidArgument) as caught:
        generate_request(prompt, options)
    assert caught.value.field == field


def test_further_options_reach_the_wire_under_their_names():
    request = generate_request(
        "a",
        {
            "min_p": 0.1,
            "repetition_penalty": 1.5,
            "presence_penalty": 0.0,
            "frequency_penalty": -0.5,
            "logit_bias": {7: -100.0, 8: 2},
            "logprobs": 0,
            "min_tokens": 2,
            "include_stop": True,
            "echo": True,
            "skip_special_tokens": False,
            "add_special_tokens": False,
            "truncate_prompt": 9,
            "priority": "interactive",
        },
    )
    sampling = common_pb2.SamplingParams(
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=0.0,
        frequency_penalty=-0.5,
        logit_bias={7: -100.0, 8: 2.0},
        logprobs=0,
    )
    assert request == pb.GenerateRequest(
        text="a",
        sampling=sampling,
        min_tokens=2,
        include_stop=True,
        echo=True,
        skip_special_tokens=False,
        add_special_tokens=False,
        truncate_prompt=9,
        priority=common_pb2.PRIORITY_INTERACTIVE,
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"json_schema": {}}, {"json_schema": "{}"}),
        ({"json_schema": '{"type": "array"}'}, {"json_schema": '{"type": "array"}'}),
        ({"json_schema": {"const": "é"}, "regex": None}, {"json_schema": '{"const": "é"}'}),
        ({"regex": ""}, {"regex": ""}),
        ({"choice": ["a", "b"]}, {"choice": pb.Choices(texts=["a", "b"])}),
        ({"choice": []}, {"choice": pb.Choices()}),
        ({"choice": "one"}, {"choice": pb.Choices(texts=["one"])}),
        ({"lark": "start: A"}, {"lark": "start: A"}),
        ({"ebnf": "root ::= a"}, {"ebnf": "root ::= a"}),
    ],
)
def test_a_constraint_is_one_of_its_kinds(options, expected):
    request = generate_request("", options)
    assert request == pb.GenerateRequest(text="", **expected)
    assert request.WhichOneof("constraint") == next(iter(expected))


def test_what_a_chat_message_has_besides_role_and_content_goes_as_json():
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "é"}]}
    messages = [{"role": "user", "content": "hi", "name": "a"}, call, {"role": "tool", "tool_call_id": "1"}]
    chat = generate_request(messages, {"tools": [{"type": "function"}], "template_variables": {"think": False}}).chat
    assert chat == pb.ChatMessages(
        messages=[
            pb.ChatMessage(role="user", content="hi", extra_json='{"name": "a"}'),
            pb.ChatMessage(role="assistant", extra_json='{"tool_calls": [{"id": "é"}]}'),
            pb.ChatMessage(role="tool", extra_json='{"tool_call_id": "1"}'),
        ],
        tools_json='[{"type": "function"}]',
        template_json='{"think": false}',
    )


def test_log_probabilities_and_the_echo_come_with_tokens_choices_and_result():
    fold = StreamFold(2)
    fold.feed(pb.GenerateResponse(accepted=pb.Accepted(request_id="r", prompt_text="once")), 0.0)
    told = common_pb2.Logprobs(token=-0.5, top=[common_pb2.TopLogprob(token_id=9, logprob=-0.25)])
    event = fold.feed(pb.GenerateResponse(token=pb.Token(index=0, logprobs=told)), 0.1)
    assert event.logprobs == kv.Logprobs(-0.5, ((9, -0.25),))
    assert fold.feed(token_of(1, 0), 0.2).logprobs is None
    fold.feed(finish_of(1), 0.3)
    fold.feed(finish_of(0), 0.4)
    result = fold.result
    assert (result.prompt_text, result.logprobs) == ("once", (event.logprobs,))
    assert [choice.logprobs for choice in result.choices] == [(event.logprobs,), ()]


def test_what_the_server_must_judge_is_sent_as_it_is():
    assert math.isnan(generate_request("a", {"temperature": math.nan}).sampling.temperature)
    assert generate_request("a", {"max_tokens": -1}).max_tokens == -1
    assert generate_request([], {}).WhichOneof("prompt") == "tokens"
    assert generate_request("", {}).WhichOneof("prompt") == "text"


@pytest.mark.parametrize("index", [0, 2])
def test_a_doubled_or_lost_token_is_an_error_of_the_server(index):
    fold = StreamFold()
    fold.feed(pb.GenerateResponse(token=pb.Token(index=0)), 0.1)
    with pytest.raises(errors.Internal, match=f"token {index} came where token 1 was due"):
        fold.feed(pb.GenerateResponse(token=pb.Token(index=index)), 0.2)


def token_of(sequence: int, index: int) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        token=pb.Token(sequence=sequence, index=index, token_id=10 * sequence + index, text=f"{sequence}{index} ")
    )


def finish_of(sequence: int, **fields) -> pb.GenerateResponse:
    usage = pb.Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
    reason = common_pb2.FINISH_REASON_STOP
    return pb.GenerateResponse(finished=pb.Finished(sequence=sequence, reason=reason, usage=usage, **fields))


def test_sequences_are_told_apart_and_end_one_by_one():
    fold = StreamFold(3)
    fold.feed(pb.GenerateResponse(accepted=pb.Accepted(request_id="r", seed=5, model="m")), 0.0)
    for at, (sequence, index) in enumerate([(1, 0), (0, 0), (2, 0), (2, 1), (0, 1)]):
        event = fold.feed(token_of(sequence, index), float(at))
        assert (event.sequence, event.index) == (sequence, index)
    fold.feed(finish_of(2, text="t2", decode_worker="d2", migrations=1), 6.0)
    assert [choice.sequence for choice in fold.choices] == [2]
    with pytest.raises(errors.Internal, match="5 tokens came, but no finish"):
        _ = fold.result
    fold.feed(finish_of(1, prefill_worker="p1"), 7.0)
    cost = pb.HandOff(transport="nixl", num_blocks=2, num_cached_blocks=3)
    fold.feed(finish_of(0, text="t0", hand_off=cost), 8.0)
    result = fold.result
    assert (result.request_id, result.seed, result.model, result.text, result.tail) == ("r", 5, "m", "00 01 t0", "t0")
    assert [(c.sequence, c.token_ids, c.text, c.migrations) for c in result.choices] == [
        (0, (0, 1), "00 01 t0", 0),
        (1, (10,), "10 ", 0),
        (2, (20, 21), "20 21 t2", 1),
    ]
    assert [(c.ttft_ms, c.gaps_ms) for c in result.choices] == [(1000.0, (3000.0,)), (0.0, ()), (2000.0, (1000.0,))]
    assert [(c.prefill_worker, c.decode_worker) for c in result.choices] == [("", ""), ("p1", ""), ("", "d2")]
    assert result.choices[0].hand_off == result.hand_off == kv.HandOff("nixl", 2, 0, 0.0, 0.0, 3)
    assert (result.usage, result.choices[1].usage) == (kv.Usage(3, 2, 1), kv.Usage(3, 2, 1))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (token_of(1, 0), "sequence 1, which is none of 2 that run"),
        (finish_of(1), "sequence 1, which is none of 2 that run"),
        (token_of(2, 0), "sequence 2, which is none of 2 that run"),
        (token_of(0, 1), "token 1 came where token 0 was due"),
    ],
)
def test_a_token_of_a_sequence_that_does_not_run_is_an_error_of_the_server(message, words):
    fold = StreamFold(2)
    fold.feed(finish_of(1), 0.1)
    with pytest.raises(errors.Internal, match=words):
        fold.feed(message, 0.2)


class Heard:
    def __init__(self, told: threading.Event) -> None:
        self.choices: list[tuple[int, str]] = []
        self.told = told

    def prompt(self, text: str) -> None:
        raise AssertionError("no echo was asked for")

    def text(self, piece: str) -> None:
        assert not self.choices

    def choice(self, choice: kv.Choice) -> None:
        self.choices.append((choice.sequence, choice.text))
        self.told.set()


async def test_the_command_line_hears_of_a_sequence_when_it_ends_also_when_another_one_fails_later(serving):
    heard = Heard(serving.inference.told)
    with pytest.raises(errors.Internal, match="boom"):
        await asyncio.to_thread(ask_cluster(serving.target, {"n": 2, "max_tokens": 1}), "uneven", heard)
    assert (heard.choices, serving.inference.was_told) == ([(1, "tail")], True)


def test_n_and_the_switch_of_the_cache_are_sent_only_if_given():
    plain, asked = generate_request("a", {}), generate_request("a", {"n": 4, "prefix_cache": False})
    assert (plain.HasField("n"), plain.HasField("prefix_cache")) == (False, False)
    assert (asked.n, asked.HasField("prefix_cache"), asked.prefix_cache) == (4, True, False)


def test_the_client_needs_neither_torch_nor_numpy():
    code = "import sys, kvrelay.client; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
