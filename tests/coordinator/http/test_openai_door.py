"""The OpenAI door of a whole coordinator with fake workers: answers, events, errors, and whose call it was."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import pytest
from support.door import MODEL, held, until
from support.fake_workers import FakeWorker
from support.http_client import wire_to
from support.http_door import HttpDoor

from coordinator import main
from coordinator.live import Times
from coordinator.main import Coordinator
from coordinator.raw import RawRequest
from kvrelay.config import CoordinatorConfig
from kvrelay.errors import FailedPrecondition, ResourceExhausted
from kvrelay.requests import Priority
from kvrelay.session import Abort, Prefill

Pair = tuple[FakeWorker, FakeWorker]
COMPLETIONS = "/v1/completions"


async def test_a_completion_in_one_piece(http: HttpDoor, pair: Pair) -> None:
    answer = await http.post(COMPLETIONS, {"prompt": "hello", "max_tokens": 3})
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    own = answer.headers["x-kvrelay-request-id"]
    said = answer.json
    assert said.pop("created") > 1_700_000_000
    assert said == {
        "id": f"cmpl-{own}",
        "object": "text_completion",
        "model": "hash",
        "choices": [{"index": 0, "text": "abc", "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 3,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    await http.grpc.idle()
    assert http.grpc.counters["outcome.length"] == 1


async def test_a_stream_has_one_event_a_token_then_its_end_its_usage_and_done(http: HttpDoor, pair: Pair) -> None:
    body = {"prompt": "hello", "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    answer = await http.post(COMPLETIONS, body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, usage, done = answer.events
    assert done == "[DONE]"
    assert [c["choices"][0]["text"] for c in chunks] == ["a", "b", "c", ""]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, None, "length"]
    assert all(c["usage"] is None and c["object"] == "text_completion" for c in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3
    assert len({c["id"] for c in [*chunks, usage]}) == 1


async def test_a_token_without_text_has_an_event_too(http: HttpDoor, pair: Pair) -> None:
    for worker in pair:
        worker.script = [0xF0, 0x9F, 0x98, 0x80, 33]
    answer = await http.post(COMPLETIONS, {"prompt": "x", "max_tokens": 5, "stream": True})
    texts = [c["choices"][0]["text"] for c in answer.events[:-1]]
    assert texts == ["", "", "", "😀", "!", ""]
    assert all("usage" not in c for c in answer.events[:-1])


async def test_text_is_escaped_so_that_no_event_breaks(http: HttpDoor, pair: Pair) -> None:
    for worker in pair:
        worker.script = list(b'\n\n"\\\x00\x7f')
    answer = await http.post(COMPLETIONS, {"prompt": "x", "max_tokens": 6, "stream": True})
    assert "".join(c["choices"][0]["text"] for c in answer.events[:-1]) == '\n\n"\\\x00\x7f'


async def test_continuous_usage_counts_the_tokens_of_each_choice(http: HttpDoor, pair: Pair) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "hello", "max_tokens": 3, "n": 2, "stream": True, "stream_options": options}
    chunks = [c for c in (await http.post(COMPLETIONS, body)).events[:-2] if not c["choices"][0]["finish_reason"]]
    for choice in (0, 1):
        own = [c["usage"] for c in chunks if c["choices"][0]["index"] == choice]
        assert [u["completion_tokens"] for u in own] == [1, 2, 3]
        assert [u["total_tokens"] for u in own] == [6, 7, 8]


async def test_choices_of_several_prompts_are_numbered_through(http: HttpDoor, pair: Pair) -> None:
    body: dict[str, Any] = {"prompt": ["ab", [1, 2, 3]], "n": 2, "max_tokens": 2, "echo": True}
    whole = (await http.post(COMPLETIONS, body)).json
    texts = [c["text"] for c in whole["choices"]]
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2, 3]
    assert texts == ["abab", "abbc", "\x01\x02\x03ab", "\x01\x02\x03bc"]
    assert whole["usage"]["prompt_tokens"] == 5
    assert whole["usage"]["completion_tokens"] == 8
    answer = await http.post(COMPLETIONS, {**body, "stream": True})
    streamed = ["", "", "", ""]
    for chunk in answer.events[:-1]:
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == texts
    await http.grpc.idle()


async def test_one_wrong_prompt_of_several_refuses_all_and_leaves_nothing(http: HttpDoor, pair: Pair) -> None:
    held(pair[0], "token0")
    answer = await http.post(COMPLETIONS, {"prompt": ["ab", [999]], "max_tokens": 2})
    assert (answer.status, answer.error["param"]) == (400, "prompt[1][0]")
    assert answer.error["message"].startswith("prompt[1][0]: must be 0 .. 257")
    await http.grpc.idle()
    pair[0].let_go("token0")


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([1, -5], "prompt[1]"),
        ([""], "prompt[0]"),
        (["ok", ""], "prompt[1]"),
        ([[1, 2], [1, -5]], "prompt[1][1]"),
        ([[1, -2]], "prompt[0][1]"),
        ([[1], []], "prompt[1]"),
        (["ok", "a" * 3000], "prompt[1]"),
    ],
)
async def test_the_wrong_prompt_of_a_list_is_named(http: HttpDoor, pair: Pair, prompt: Any, param: str) -> None:
    answer = await http.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 2})
    assert (answer.status, answer.error["param"]) == (400, param)
    assert answer.error["message"].startswith(f"{param}: ")


async def test_log_probabilities_of_a_completion(http: HttpDoor, pair: Pair) -> None:
    body = {"prompt": "hello", "max_tokens": 2, "logprobs": 2}
    whole = (await http.post(COMPLETIONS, body)).json["choices"][0]["logprobs"]
    assert whole["tokens"] == ["a", "b"]
    assert whole["text_offset"] == [0, 1]
    assert whole["token_logprobs"] == [-97 / 1024, -1 - 98 / 1024]
    assert whole["top_logprobs"][0] == {"\x00": 0.0, "\x01": -1 / 1024, "a": -97 / 1024}
    chunks = (await http.post(COMPLETIONS, {**body, "stream": True})).events[:-2]
    entries = [c["choices"][0]["logprobs"] for c in chunks]
    assert {key: [one for e in entries for one in e[key]] for key in whole} == whole


async def test_the_default_of_16_tokens_gives_way_to_a_full_context(http: HttpDoor, pair: Pair) -> None:
    limit = http.grpc.coordinator.serving.limits.context_limit
    short = (await http.post(COMPLETIONS, {"prompt": [1] * (limit - 2)})).json
    usual = (await http.post(COMPLETIONS, {"prompt": "x"})).json
    assert short["usage"]["completion_tokens"] == 2
    assert usual["usage"]["completion_tokens"] == 16


async def test_fields_reach_the_workers(http: HttpDoor, pair: Pair) -> None:
    body = {"prompt": "hi", "max_tokens": 4, "min_tokens": 2, "seed": 7, "top_k": 5, "priority": "batch", "n": 2}
    await http.post(COMPLETIONS, {**body, "logit_bias": {"97": 1.5}, "presence_penalty": 0.5})
    work = pair[0].commands(Prefill)[0].work
    assert (work.sampling.seed, work.sampling.top_k, work.n, work.stop.min_tokens) == (7, 5, 2, 2)
    assert (work.sampling.logit_bias, work.sampling.presence_penalty) == (((97, 1.5),), 0.5)
    assert work.priority is Priority.BATCH


async def test_a_caller_gets_back_its_own_id_and_ours(http: HttpDoor, pair: Pair) -> None:
    mine = await http.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1}, x_request_id="mine")
    none = await http.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1})
    wrong = await http.post(COMPLETIONS, {"prompt": ""}, x_request_id="mine")
    long = await http.post(COMPLETIONS, {"prompt": "x"}, x_request_id="m" * 257)
    assert mine.headers["x-request-id"] == wrong.headers["x-request-id"] == "mine"
    assert none.headers["x-request-id"] == none.headers["x-kvrelay-request-id"]
    assert mine.json["id"] == f"cmpl-{mine.headers['x-kvrelay-request-id']}"
    assert (long.status, long.error["param"]) == (400, "x-request-id")
    odd = await http.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1}, x_request_id="a\tb")
    for answer in (long, odd):
        assert answer.headers["x-request-id"] == answer.headers["x-kvrelay-request-id"]


async def test_a_deadline_in_a_header_ends_the_request(http: HttpDoor, pair: Pair) -> None:
    held(pair[0], "token0")
    late = await http.post(COMPLETIONS, {"prompt": "x"}, x_request_timeout="0.05")
    assert (late.status, late.error["code"]) == (504, "deadline_exceeded")
    pair[0].let_go("token0")
    for text in ("soon", "-1", "nan", "inf"):
        wrong = await http.post(COMPLETIONS, {"prompt": "x"}, x_request_timeout=text)
        assert (wrong.status, wrong.error["param"]) == (400, "x-request-timeout")
    await http.grpc.idle()


async def test_an_error_inside_a_stream_is_its_last_event(http: HttpDoor, pair: Pair) -> None:
    for worker in pair:
        worker.script = [97, 98, 5000]
    answer = await http.post(COMPLETIONS, {"prompt": "x", "max_tokens": 9, "stream": True})
    assert answer.status == 200
    *chunks, last = answer.events
    assert [c["choices"][0]["text"] for c in chunks] == ["a", "b"]
    assert last["error"]["type"] == "server_error"
    again = await http.post(COMPLETIONS, {"prompt": "x", "max_tokens": 9})
    assert again.status == 500
    await http.grpc.idle()


async def test_an_error_before_the_first_token_has_a_status_of_its_own(http: HttpDoor) -> None:
    answer = await http.post(COMPLETIONS, {"prompt": "x", "stream": True})
    assert (answer.status, answer.error["code"]) == (503, "unavailable")
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("door", [{"open_limit": 1}], indirect=True)
async def test_too_many_requests_are_told_when_to_come_again(http: HttpDoor, pair: Pair) -> None:
    held(pair[0], "token0")
    async with wire_to(http.address) as wire:
        wire.ask(COMPLETIONS, {"prompt": "x", "max_tokens": 1})
        await until(lambda: pair[0].commands(Prefill))
        refused = await http.post(COMPLETIONS, b"never looked at")
        assert (refused.status, refused.error["type"]) == (429, "rate_limit_error")
        assert int(refused.headers["retry-after"]) >= 1
        assert int(refused.headers["retry-after-ms"]) > 0
        pair[0].let_go("token0")
        assert (await wire.read()).status == 200


@pytest.mark.parametrize("door", [{"queue_limit": 4}], indirect=True)
async def test_all_prompts_of_a_body_come_in_or_none(http: HttpDoor, pair: Pair) -> None:
    held(pair[1], "reserve")
    counters, serving = http.grpc.counters, http.grpc.coordinator.serving
    async with wire_to(http.address) as wire:
        wire.ask(COMPLETIONS, {"prompt": ["x" * 900] * 3, "max_tokens": 2})
        await until(lambda: http.grpc.coordinator.dispatcher.num_queued == 2)
        assert counters["started"] == 3
        refused = await http.post(COMPLETIONS, {"prompt": ["a"] * 3, "n": 2})
        assert (refused.status, refused.error["type"]) == (429, "rate_limit_error")
        assert int(refused.headers["retry-after"]) >= 1
        assert counters["started"] == 3
        never = await http.post(COMPLETIONS, {"prompt": ["a"] * 5})
        assert (never.status, never.error["param"]) == (400, "prompt")
        with serving.room(2), pytest.raises(ResourceExhausted, match="4 requests wait already; that is the limit"):
            await serving.open(RawRequest(text="a"), Times(time.monotonic(), 0))
        pair[1].let_go("reserve")
        answer = await wire.read()
        assert [choice["text"] for choice in answer.json["choices"]] == ["ab"] * 3
    fits = await http.post(COMPLETIONS, {"prompt": ["a"] * 4, "n": 2, "max_tokens": 2})
    assert [choice["index"] for choice in fits.json["choices"]] == list(range(8))
    wrong = await http.post(COMPLETIONS, {"prompt": ["a", ""], "max_tokens": 2})
    assert (wrong.status, http.grpc.coordinator.dispatcher.refusal()) == (400, None)
    await http.grpc.idle()
    assert (await http.post(COMPLETIONS, {"prompt": ["a"] * 4, "max_tokens": 2})).status == 200


async def test_a_body_asks_for_at_most_1024_choices(http: HttpDoor, pair: Pair) -> None:
    refused = await http.post(COMPLETIONS, {"prompt": ["a"] * 65, "n": 16})
    assert (refused.status, refused.error["param"]) == (400, "n")
    assert refused.error["message"] == "n: at most 1024 choices in all, not 16 of each of 65 prompts"


@pytest.mark.parametrize("door", [{"max_request_bytes": 1000}], indirect=True)
async def test_a_body_over_the_limit_is_413_and_the_connection_goes_on(http: HttpDoor, pair: Pair) -> None:
    async with wire_to(http.address) as wire:
        wire.ask(COMPLETIONS, {"prompt": "x" * 1000})
        large = await wire.read()
        assert (large.status, large.error["code"]) == (413, "request_too_large")
        wire.ask(COMPLETIONS, {"prompt": "x", "max_tokens": 1})
        assert (await wire.read()).status == 200
        chunks = b"".join(b"100\r\n" + b"x" * 256 + b"\r\n" for _ in range(4)) + b"0\r\n\r\n"
        head = b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n"
        wire.writer.write(head + chunks)
        assert (await wire.read()).status == 413


async def test_packed_bodies_and_unknown_paths_and_methods_are_refused_in_openais_shape(http: HttpDoor) -> None:
    packed = await http.post(COMPLETIONS, b"x", content_encoding="gzip")
    nowhere = await http.post("/v1/embeddings", {})
    method = await http.get(COMPLETIONS)
    assert [a.status for a in (packed, nowhere, method)] == [415, 404, 405]
    assert [a.error["code"] for a in (packed, nowhere, method)] == [
        "unsupported_encoding",
        "not_found",
        "method_not_allowed",
    ]


async def test_models_version_health_and_metrics(http: HttpDoor) -> None:
    models = (await http.get("/v1/models")).json
    assert [(m["id"], m["object"], m["max_model_len"]) for m in models["data"]] == [
        ("hash", "model", http.grpc.coordinator.serving.limits.context_limit)
    ]
    assert (await http.get("/v1/models/hash")).json == models["data"][0]
    other = await http.get("/v1/models/org/other")
    assert (other.status, other.error["code"], other.error["param"]) == (404, "model_not_found", "model")
    assert "version" in (await http.get("/version")).json
    metrics = await http.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=")
    assert b"kvrelay_requests_started_total 0.0" in metrics.body
    assert (await http.get("/health")).status == 503
    schema = (await http.get("/openapi.json")).json
    assert {COMPLETIONS, "/v1/chat/completions", "/tokenize", "/detokenize"} <= set(schema["paths"])


async def test_a_bug_behind_a_get_is_said_in_openais_shape(http: HttpDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise RuntimeError("secret")

    monkeypatch.setattr(http.server.door, "collect", broken)
    answer = await http.get("/metrics")
    assert (answer.status, answer.error["type"]) == (500, "server_error")
    assert b"secret" not in answer.body


async def test_it_is_healthy_once_there_is_a_decode_worker(http: HttpDoor, pair: Pair) -> None:
    assert (await http.get("/health")).status == 200


async def test_tokenize_and_detokenize_as_vllm_has_them(http: HttpDoor) -> None:
    limit = http.grpc.coordinator.serving.limits.context_limit
    tokens = (await http.post("/tokenize", {"prompt": "hi"})).json
    assert tokens == {"count": 2, "max_model_len": limit, "tokens": [104, 105]}
    assert (await http.post("/detokenize", {"tokens": [104, 105]})).json == {"prompt": "hi"}
    wrong = await http.post("/detokenize", {"tokens": [104, 999]})
    assert (wrong.status, wrong.error["param"]) == (400, "tokens[1]")
    assert (await http.post("/detokenize", {})).error["param"] == "tokens"
    assert (await http.post("/tokenize", {})).error["param"] == "prompt"
    chat = await http.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]})
    assert (chat.status, chat.error["param"]) == (400, "messages")


async def test_a_chat_without_a_template_is_refused_by_name(http: HttpDoor, pair: Pair) -> None:
    answer = await http.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    assert (answer.status, answer.error["param"]) == (400, "messages")


async def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        coordinator = Coordinator(CoordinatorConfig(listen="127.0.0.1:0", executor="hash", http=address), MODEL)
        with pytest.raises(FailedPrecondition, match=f"cannot serve HTTP on {address}: Address already in use"):
            await coordinator.start()
        await coordinator.stop(0)


def test_packages_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "HTTP_NEEDS", ("json", "no_such_package"))
    main.require_http(CoordinatorConfig(http=""))
    with pytest.raises(FailedPrecondition, match=r"no_such_package is not installed; pip install 'kvrelay\[http\]'"):
        main.require_http(CoordinatorConfig(http="127.0.0.1:0"))


async def test_many_requests_on_one_connection_one_after_the_other(http: HttpDoor, pair: Pair) -> None:
    async with wire_to(http.address) as wire:
        for number in range(1, 6):
            wire.ask(COMPLETIONS, {"prompt": "x", "max_tokens": number, "stream": number % 2 == 0})
            answer = await wire.read()
            assert answer.status == 200
            if number % 2:
                assert answer.json["usage"]["completion_tokens"] == number
    assert not [c for w in pair for c in w.commands(Abort)]


async def test_thirty_two_streams_at_once_each_get_their_own(http: HttpDoor, pair: Pair) -> None:
    async def one(number: int) -> str:
        body = {"prompt": "x", "max_tokens": number + 1, "stream": True}
        events = (await http.post(COMPLETIONS, body)).events
        assert events[-1] == "[DONE]"
        return "".join(c["choices"][0]["text"] for c in events[:-1])

    texts = await asyncio.gather(*(one(n) for n in range(32)))
    assert texts == ["".join(chr(97 + i % 26) for i in range(n + 1)) for n in range(32)]
    await http.grpc.idle()
