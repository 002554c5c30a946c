"""Bodies of OpenAI's API as requests of ours: each field, each shape of a prompt, each refusal with its name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coordinator.constraints import Constraint, ConstraintKind
from coordinator.http.chat_completions import chat_completions
from coordinator.http.completions import completions
from coordinator.http.errors import error_body, meaning_of, param_of, retry_headers
from coordinator.http.generation import Asked
from coordinator.raw import RawRequest
from kvrelay import errors
from kvrelay.errors import InvalidArgument, KVRelayError, Unimplemented
from kvrelay.requests import Priority

USER = {"role": "user", "content": "hi"}


def completion(label: str = "", **body: Any) -> Asked:
    return completions(json.dumps({"prompt": "hi", **body}).encode(), label)


def chat(**body: Any) -> Asked:
    return chat_completions(json.dumps({"messages": [USER], **body}).encode(), "")


def only(asked: Asked) -> RawRequest:
    (raw,) = asked.requests
    return raw


def test_a_bare_prompt_takes_every_default() -> None:
    asked = completion()
    assert only(asked) == RawRequest(text="hi", usual_tokens=16, template_variables=None)
    assert (asked.streams, asked.says_usage, asked.counts) == (False, False, False)


def test_every_field_of_a_completion_has_its_place() -> None:
    raw = only(
        completion(
            model="m",
            n=2,
            best_of=2,
            stop="x",
            seed=-1,
            temperature=0,
            top_p=0.5,
            top_k=-1,
            min_p=0.1,
            presence_penalty=1,
            frequency_penalty=-1,
            repetition_penalty=1.5,
            logit_bias={"5": 1, "6": -2.5},
            max_tokens=9,
            min_tokens=3,
            ignore_eos=True,
            stop_token_ids=[4],
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            add_special_tokens=False,
            truncate_prompt_tokens=7,
            cache_salt="s",
            priority=-3,
            user="u",
            logprobs=2,
        )
    )
    assert raw == RawRequest(
        model="m",
        text="hi",
        n=2,
        stop=("x",),
        seed=2**64 - 1,
        temperature=0.0,
        top_p=0.5,
        top_k=0,
        min_p=0.1,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.5,
        logit_bias=((5, 1.0), (6, -2.5)),
        max_tokens=9,
        usual_tokens=16,
        min_tokens=3,
        ignore_eos=True,
        stop_token_ids=(4,),
        include_stop=True,
        skip_special_tokens=False,
        add_special_tokens=False,
        truncate_prompt=7,
        cache_salt="s",
        priority=Priority.INTERACTIVE,
        client_request_id="u",
        logprobs=2,
    )


@pytest.mark.parametrize(
    ("prompt", "texts", "ids"),
    [
        ("a", ["a"], [None]),
        ([1, 2], [None], [(1, 2)]),
        (["a", "b"], ["a", "b"], [None, None]),
        ([[1], [2, 3]], [None, None], [(1,), (2, 3)]),
        (["a", [7]], ["a", None], [None, (7,)]),
    ],
)
def test_a_prompt_has_many_shapes(prompt: Any, texts: list[str | None], ids: list[tuple[int, ...] | None]) -> None:
    requests = completion(prompt=prompt).requests
    assert [r.text for r in requests] == texts
    assert [r.token_ids for r in requests] == ids


def test_unknown_fields_and_nulls_are_as_if_they_were_not_there() -> None:
    nulls = dict.fromkeys(("stop", "seed", "max_tokens", "suffix", "logit_bias", "stream_options", "best_of"))
    assert completion(**nulls, store=True, metadata={"a": 1}, service_tier="flex", nonsense=[1]) == completion()


def test_a_header_wins_over_user_as_the_label() -> None:
    assert only(completion("label", user="u")).client_request_id == "label"


@pytest.mark.parametrize(
    ("value", "priority"),
    [(0, Priority.NORMAL), (5, Priority.BATCH), (-1, Priority.INTERACTIVE), ("batch", Priority.BATCH)],
)
def test_priority_is_a_number_or_a_name(value: Any, priority: Priority) -> None:
    assert only(completion(priority=value)).priority is priority


def test_max_completion_tokens_wins_and_lends_its_name_to_errors() -> None:
    asked = chat(max_tokens=3, max_completion_tokens=4)
    assert only(asked).max_tokens == 4
    assert only(asked).usual_tokens is None
    assert param_of("max_tokens", asked.names) == "max_completion_tokens"


def test_messages_keep_what_a_template_may_read() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    raw = only(
        chat(
            messages=[
                {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "1", "tool_call_id": "1"},
            ],
            tools=[{"type": "function", "function": {"name": "f"}}],
            chat_template_kwargs={"x": 1},
            add_generation_prompt=False,
        )
    )
    assert raw.chat == (
        {"role": "system", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**call, "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "1", "tool_call_id": "1"},
    )
    assert raw.tools == [{"type": "function", "function": {"name": "f"}}]
    assert raw.template_variables == {"x": 1, "add_generation_prompt": False}


def test_tools_are_not_shown_where_none_may_be_called() -> None:
    assert only(chat(tools=[{"type": "function"}], tool_choice="none")).tools is None
    assert only(chat(tools=[{"type": "function"}], tool_choice="auto")).tools == [{"type": "function"}]


def test_chat_asks_for_log_probabilities_in_two_fields() -> None:
    assert only(chat()).logprobs is None
    assert only(chat(logprobs=True)).logprobs == 0
    assert only(chat(logprobs=True, top_logprobs=3)).logprobs == 3
    assert param_of("sampling.logprobs", chat(logprobs=True).names) == "top_logprobs"


SCHEMA = {"type": "object"}
JSON = ConstraintKind.JSON_SCHEMA


@pytest.mark.parametrize(
    ("body", "constraint", "field", "param"),
    [
        ({"response_format": {"type": "text"}}, None, "json_schema", "json_schema"),
        ({"response_format": {"type": "json_object"}}, Constraint(JSON, "{}"), "json_schema", "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            Constraint(JSON, '{"type": "object"}'),
            "json_schema",
            "response_format.json_schema.schema",
        ),
        (
            {"structured_outputs": {"json": SCHEMA}},
            Constraint(JSON, '{"type": "object"}'),
            "json_schema",
            "structured_outputs.json",
        ),
        (
            {"structured_outputs": {"regex": "a+"}},
            Constraint(ConstraintKind.REGEX, "a+"),
            "regex",
            "structured_outputs.regex",
        ),
        (
            {"structured_outputs": {"choice": ["a", "b"]}},
            Constraint(ConstraintKind.CHOICE, choices=("a", "b")),
            "choice.texts[1]",
            "structured_outputs.choice[1]",
        ),
        (
            {"structured_outputs": {"grammar": "root ::= [ab]"}},
            Constraint(ConstraintKind.EBNF, "root ::= [ab]"),
            "ebnf",
            "structured_outputs.grammar",
        ),
        (
            {"guided_grammar": 'start: "a"'},
            Constraint(ConstraintKind.LARK, 'start: "a"'),
            "lark",
            "guided_grammar",
        ),
        ({"guided_json": '{"type":"object"}'}, Constraint(JSON, '{"type": "object"}'), "json_schema", "guided_json"),
    ],
)
def test_constraints_have_many_names(body: Any, constraint: Constraint | None, field: str, param: str) -> None:
    asked = completion(**body)
    assert only(asked).constraint == constraint
    assert param_of(field, asked.names) == param


@pytest.mark.parametrize(
    ("kind", "body", "error", "param"),
    [
        (completion, {"suffix": "x"}, Unimplemented, "suffix"),
        (completion, {"best_of": 3, "n": 2}, Unimplemented, "best_of"),
        (completion, {"echo": True, "logprobs": 1}, Unimplemented, "logprobs"),
        (completion, {"prompt_logprobs": 0, "use_beam_search": True}, Unimplemented, "use_beam_search"),
        (completion, {"prompt_logprobs": 1}, Unimplemented, "prompt_logprobs"),
        (completion, {"max_tokens": "5"}, InvalidArgument, "max_tokens"),
        (completion, {"max_tokens": 2**70}, InvalidArgument, "max_tokens"),
        (completion, {"n": True}, InvalidArgument, "n"),
        (completion, {"temperature": "hot"}, InvalidArgument, "temperature"),
        (completion, {"stop": ["a", 3]}, InvalidArgument, "stop[1]"),
        (completion, {"stop": 3}, InvalidArgument, "stop"),
        (completion, {"prompt": None}, InvalidArgument, "prompt"),
        (completion, {"prompt": []}, InvalidArgument, "prompt"),
        (completion, {"prompt": {"a": 1}}, InvalidArgument, "prompt"),
        (completion, {"prompt": ["a", 5]}, InvalidArgument, "prompt[1]"),
        (completion, {"prompt": [[1, "a"]]}, InvalidArgument, "prompt[0]"),
        (completion, {"prompt": ["a"] * 129}, InvalidArgument, "prompt"),
        (completion, {"stop_token_ids": [1, "a"]}, InvalidArgument, "stop_token_ids[1]"),
        (completion, {"logit_bias": {"a": 1}}, InvalidArgument, "logit_bias"),
        (completion, {"logit_bias": {"1": "a"}}, InvalidArgument, "logit_bias[1]"),
        (completion, {"logit_bias": {"1": 10**400}}, InvalidArgument, "logit_bias[1]"),
        (completion, {"logit_bias": [1]}, InvalidArgument, "logit_bias"),
        (completion, {"logit_bias": {str(i): 1 for i in range(1025)}}, InvalidArgument, "logit_bias"),
        (completion, {"stop": ["a"] * 17}, InvalidArgument, "stop"),
        (completion, {"guided_json": "[" * 9999}, InvalidArgument, "guided_json"),
        (completion, {"guided_json": {"a": "é" * 65_536}}, InvalidArgument, "guided_json"),
        (completion, {"guided_json": {"a": [[1, {"b": 1}]] * 20_000}}, InvalidArgument, "guided_json"),
        (completion, {"logprobs": True}, InvalidArgument, "logprobs"),
        (completion, {"priority": 1.5}, InvalidArgument, "priority"),
        (completion, {"logprobs": "1"}, InvalidArgument, "logprobs"),
        (completion, {"priority": "urgent"}, InvalidArgument, "priority"),
        (completion, {"stream_options": {"include_usage": True}}, InvalidArgument, "stream_options"),
        (
            completion,
            {"stream": True, "stream_options": {"include_usage": 1}},
            InvalidArgument,
            "stream_options.include_usage",
        ),
        (completion, {"response_format": {"type": "xml"}}, InvalidArgument, "response_format.type"),
        (
            completion,
            {"structured_outputs": {"structural_tag": {}}},
            Unimplemented,
            "structured_outputs.structural_tag",
        ),
        (completion, {"guided_json": "{", "n": 1}, InvalidArgument, "guided_json"),
        (completion, {"guided_regex": "a", "guided_json": {}}, InvalidArgument, "guided_regex"),
        (chat, {"messages": None}, InvalidArgument, "messages"),
        (chat, {"messages": [5]}, InvalidArgument, "messages[0]"),
        (chat, {"messages": [{"content": "x"}]}, InvalidArgument, "messages[0].role"),
        (chat, {"messages": [USER, {"role": "user", "content": 5}]}, InvalidArgument, "messages[1].content"),
        (
            chat,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
            Unimplemented,
            "messages[0].content[1].type",
        ),
        (chat, {"tool_choice": "required"}, Unimplemented, "tool_choice"),
        (chat, {"tool_choice": {"type": "function"}}, Unimplemented, "tool_choice"),
        (chat, {"top_logprobs": 2}, InvalidArgument, "top_logprobs"),
        (chat, {"modalities": ["text", "audio"]}, Unimplemented, "modalities"),
        (chat, {"functions": [{"name": "f"}]}, Unimplemented, "functions"),
        (chat, {"echo": True}, Unimplemented, "echo"),
        (chat, {"tools": {"a": 1}}, InvalidArgument, "tools"),
    ],
)
def test_what_is_wrong_is_refused_by_the_name_it_was_written_with(
    kind: Any, body: dict[str, Any], error: type[KVRelayError], param: str
) -> None:
    with pytest.raises(error) as refused:
        kind(**body)
    assert param_of(refused.value.field, {}) == param
    assert param in refused.value.message


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "the body is not JSON: EOF"),
        (b'{"prompt":', "the body is not JSON: EOF"),
        (b"[1]", "the body must be a JSON object"),
        (b'{"prompt": "\xff"}', "the body is not JSON"),
        (b'{"tools":' + b"[" * 5000 + b"]" * 5000 + b"}", "the body is not JSON: recursion limit"),
    ],
)
def test_a_body_that_is_no_object_is_refused_in_words(raw: bytes, words: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        completions(raw, "")
    assert refused.value.message.startswith(words)
    assert refused.value.field == ""


def test_what_asks_for_nothing_is_not_refused() -> None:
    bare = completion(stream_options={}, logprobs=False, stream=False)
    assert (only(bare), bare.says_usage) == (only(completion()), False)
    assert only(completion(stream_options={"include_usage": False}, logprobs=False, echo=True)).logprobs is None
    assert (
        chat(modalities=["text"], function_call="none", tools=[], audio=None, echo=False, length_penalty=1.0) == chat()
    )


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (InvalidArgument("text: must not be empty", field="text"), 400, "invalid_request_error", "invalid_value"),
        (errors.NotFound("x"), 404, "invalid_request_error", "model_not_found"),
        (errors.Unauthenticated("x"), 401, "authentication_error", "invalid_api_key"),
        (errors.PermissionDenied("x"), 403, "permission_error", None),
        (errors.ResourceExhausted("x"), 429, "rate_limit_error", "rate_limit_exceeded"),
        (errors.Internal("x"), 500, "server_error", "internal_error"),
        (errors.LayoutMismatch("x"), 500, "server_error", "failed_precondition"),
        (errors.Unavailable("x"), 503, "server_error", "unavailable"),
        (errors.Aborted("x"), 503, "server_error", "aborted"),
        (errors.DeadlineExceeded("x"), 504, "timeout_error", "deadline_exceeded"),
        (Unimplemented("x"), 400, "invalid_request_error", "unsupported_parameter"),
    ],
)
def test_each_error_has_its_status_and_words(error: KVRelayError, status: int, kind: str, code: str | None) -> None:
    assert meaning_of(error).status == status
    body = json.loads(error_body(error))["error"]
    assert (body["type"], body["code"]) == (kind, code)


def test_an_error_speaks_of_the_field_as_the_caller_wrote_it() -> None:
    body = json.loads(error_body(InvalidArgument("tokens.ids[3]: must be 0 .. 9, not 12", field="tokens.ids[3]")))
    assert body["error"]["message"] == "prompt[3]: must be 0 .. 9, not 12"
    assert body["error"]["param"] == "prompt[3]"
    assert param_of("chat.messages[2].role", {}) == "messages[2].role"
    assert param_of("sampling.logit_bias[7]", {}) == "logit_bias[7]"


def test_what_may_be_tried_again_says_when() -> None:
    assert retry_headers(InvalidArgument("x")) == []
    assert dict(retry_headers(errors.Unavailable("x"))) == {b"retry-after": b"1", b"retry-after-ms": b"1000"}
    late = errors.ResourceExhausted("x", retry_after_s=2.2)
    assert dict(retry_headers(late)) == {b"retry-after": b"3", b"retry-after-ms": b"2200"}
