"""Constraints: what is refused, in which words, what compiles, and that nothing hostile reaches the server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

import coordinator.compiling as compiling_module
from coordinator.compiling import Compiling
from coordinator.constraints import MAX_GRAMMAR_BYTES, Constraint, ConstraintKind, check_constraint, compile_grammar
from kvrelay.errors import InvalidArgument, ResourceExhausted
from kvrelay.guidance import byte_tokenizer, limits

TOKENIZER = byte_tokenizer(258, 256)
CHAIN = "start: a\n" + "".join(f"a{i or ''}: a{i + 1} a{i + 1}\n" for i in range(3000)) + 'a3000: "x"'


def of(kind: str, text: str) -> Constraint:
    return Constraint(ConstraintKind(kind), text)


def choice(*texts: str) -> Constraint:
    return Constraint(ConstraintKind.CHOICE, choices=texts)


def matches(constraint: Constraint, text: str) -> bool:
    from llguidance import LLMatcher

    matcher = LLMatcher(TOKENIZER, compile_grammar(constraint), log_level=0, limits=limits())
    assert not matcher.is_error(), matcher.get_error()
    raw = list(text.encode())
    return bool(matcher.try_consume_tokens(raw) == len(raw) and matcher.is_accepting())


def refusal(constraint: Constraint) -> tuple[str, str]:
    with pytest.raises(InvalidArgument) as refused:
        compile_grammar(constraint)
    return refused.value.field, refused.value.message


@pytest.fixture
async def compiling() -> AsyncIterator[Compiling]:
    one = Compiling("")
    yield one
    one.close()


async def refused_by(compiling: Compiling, constraint: Constraint) -> str:
    with pytest.raises(InvalidArgument) as refused:
        await compiling.grammar(constraint)
    assert refused.value.field == constraint.kind
    return refused.value.message.removeprefix(f"{constraint.kind}: ")


def test_choices_are_one_to_256_texts_each_named_by_its_place() -> None:
    assert refusal(choice()) == ("choice.texts", "choice.texts: must be 1 .. 256 texts, not 0")
    assert refusal(choice(*map(str, range(257)))) == ("choice.texts", "choice.texts: must be 1 .. 256 texts, not 257")
    assert refusal(choice("a", "")) == ("choice.texts[1]", "choice.texts[1]: must not be empty")
    assert refusal(choice("\ud800"))[0] == "choice.texts[0]"
    most = "x" * (MAX_GRAMMAR_BYTES // 2)
    check_constraint(choice(most, most))
    assert refusal(choice(most, most, "y"))[1] == "choice.texts: must have at most 65536 bytes together, not 65537"


@pytest.mark.parametrize("kind", ["json_schema", "regex", "lark", "ebnf"])
def test_a_text_is_1_to_65536_bytes_of_unicode(kind: str) -> None:
    assert refusal(of(kind, "")) == (kind, f"{kind}: must not be empty")
    assert refusal(of(kind, "é" * 32_769)) == (kind, f"{kind}: must have at most 65536 bytes, not 65538")
    assert refusal(of(kind, "a\ud800")) == (kind, f"{kind}: holds half of a surrogate pair: it has no UTF-8")
    check_constraint(of(kind, "x" * MAX_GRAMMAR_BYTES))


def test_a_choice_is_answered_byte_for_byte_whatever_it_holds() -> None:
    texts = (
        'say "hi"',
        "back\\slash",
        "two\nlines",
        "\x00\x1f\x7f\x80",
        "día \u2028 😀",
        "%json {}",
        "a|b",
        "yes",
        "yesterday",
    )
    for text in texts:
        assert matches(choice(*texts, "yes"), text)
        assert not matches(choice(*texts), text + "!")


def test_what_becomes_too_long_a_grammar_for_one_frame_is_refused_by_its_field() -> None:
    assert refusal(of("lark", 'start: "a"' + "\x01" * 60_000)) == (
        "lark",
        "lark: must have at most 163840 bytes as a grammar, not 360046",
    )
    texts = [chr(0x10000 + i) + "\x01" * 200 for i in range(256)]
    assert refusal(choice(*texts))[0] == "choice.texts"
    assert len(compile_grammar(choice("é" * 32_768)).encode()) < MAX_GRAMMAR_BYTES + 100, "other letters are not more"


def test_an_empty_schema_means_any_object_and_nothing_but_an_object() -> None:
    assert matches(of("json_schema", "{}"), '{"a": [1, null, {"b": "c"}]}')
    assert not any(matches(of("json_schema", "{}"), text) for text in ("[]", "1", "true", '"a"', ' {"a":1}', "{} "))


def test_whitespace_in_json_is_a_new_line_and_32_spaces_at_most() -> None:
    schema = of("json_schema", '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}')
    assert matches(schema, '{"a":1}') and matches(schema, '{\n    "a": 1\n}') and matches(schema, '{\t"a" : 1 }')
    assert not matches(schema, '{\n\n"a":1}') and not matches(schema, "{" + " " * 33 + '"a":1}')


def test_properties_come_in_the_order_of_the_schema() -> None:
    two = '{"type":"object","properties":{"b":{"type":"null"},"a":{"type":"null"}},"required":["a","b"]}'
    assert matches(of("json_schema", two), '{"b":null,"a":null}')
    assert not matches(of("json_schema", two), '{"a":null,"b":null}')


def test_what_is_no_schema_is_refused_in_words() -> None:
    assert refusal(of("json_schema", "{"))[1].startswith("json_schema: is not JSON: Expecting property name")
    assert refusal(of("json_schema", "true")) == ("json_schema", "json_schema: must be a JSON object")
    assert refusal(of("json_schema", '{"x-guidance":{"lenient":true},"not":{}}'))[1] == (
        "json_schema: x-guidance is not supported: the server decides how a schema is read"
    )
    assert refusal(of("json_schema", '{"a":' * 10_000 + "1" + "}" * 10_000))[1] == "json_schema: is nested too deeply"


def test_a_regex_is_the_whole_answer() -> None:
    assert matches(of("regex", "a/b|[/]"), "a/b") and matches(of("regex", "^a|b$"), "b")
    assert not matches(of("regex", "b"), "ab") and not matches(of("regex", "b"), "bc")


def test_a_grammar_of_lark_is_never_taken_for_anything_else() -> None:
    assert matches(of("lark", 'start: "a" /b+/'), "abb")
    inner = '{"grammars":[{"json_schema":{"x-guidance":{"lenient":true},"not":{}}}]}'
    assert json.loads(compile_grammar(of("lark", inner))) == {"grammars": [{"lark_grammar": inner}]}


def test_gbnf_says_what_it_says_in_llama_cpp() -> None:
    assert matches(of("ebnf", 'root ::= "\\u00e9" [\\u4e00-\\u9fff] "\\x41\\x07"'), "é中A\x07")
    assert matches(of("ebnf", 'root ::= [a\\x2dz]+ "\\U0001f600"'), "a-z😀")
    assert not matches(of("ebnf", 'root ::= [a\\x2dz]+ "\\U0001f600"'), "b😀")
    assert matches(of("ebnf", "root ::= ."), "\n")
    assert matches(of("ebnf", 'root ::= "a#(" [#\\]\\[/]{2} # "comment" (\n'), "a#(]/")
    assert matches(of("ebnf", 'root ::= "a"? |\n "b" |'), "")
    assert matches(of("ebnf", 'root ::= pair*\npair ::= key-name "=" [0-9]+ ";"\nkey-name ::= [a-z]+'), "a=1;b=22;")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("root ::= [a&&b]", "ebnf: '[a&&b]': && in a class is not supported: write its second character as an escape"),
        ("root ::= " + "(" * 101 + '"a"' + ")" * 101, "ebnf: must be nested at most 100 deep"),
        ("a ::= b\n" * 1001, "ebnf: must have at most 1000 rules, not 1001"),
        ("root ::= a", "ebnf: is not GBNF: Rule 'a' not found"),
        ('a ::= "b"', "ebnf: is not GBNF: No 'root' rule found"),
        ('start: "a"', "ebnf: is not GBNF: Expected ::= at line 1, 'start' ^ ': \"a\"'"),
        ('root ::= "\\ud800"', "ebnf: \\ud800 is no character"),
        ("root ::= a-b a_b\na-b ::= [x]\na_b ::= [y]", "ebnf: is not GBNF: Rule 'A_B' already exists"),
    ],
)
def test_what_is_no_gbnf_or_cannot_be_said_in_lark_is_refused_by_name(text: str, words: str) -> None:
    assert refusal(of("ebnf", text)) == ("ebnf", words)


async def test_a_keyword_of_json_schema_that_is_not_supported_is_refused_by_name(compiling: Compiling) -> None:
    unsupported = "not if contains minContains uniqueItems propertyNames dependentRequired dependentSchemas"
    for keyword in f"{unsupported} unevaluatedProperties unevaluatedItems dependencies $dynamicRef".split():
        schema = {"type": "object", "properties": {"a": {"type": "array", keyword: {}}}}
        words = await refused_by(compiling, of("json_schema", json.dumps(schema)))
        assert words == f'Unimplemented keys: ["{keyword}"]'


async def test_what_llguidance_says_of_a_constraint_reaches_the_client(compiling: Compiling) -> None:
    assert "unclosed group" in await refused_by(compiling, of("regex", "(a"))
    assert "look-around" in await refused_by(compiling, of("regex", "(?=a)b"))
    assert await refused_by(compiling, of("json_schema", '{"type":"foo"}')) == "Invalid type: foo"
    assert await refused_by(compiling, of("json_schema", '{"format":"x"}')) == "Unknown format: x"
    assert "oneOf" in await refused_by(compiling, of("json_schema", '{"oneOf":[{"minLength":3},{"type":"string"}]}'))
    assert "retrieving it failed" in await refused_by(compiling, of("json_schema", '{"$ref":"http://a/b"}'))
    assert await refused_by(compiling, of("lark", 'start: %json {"x-guidance":{"lenient":true},"not":{}}')) == (
        'Unimplemented keys: ["not"]'
    )
    for nothing in (of("regex", r"[^\s\S]"), of("lark", "start: a\na: a"), of("json_schema", '{"$ref":"#"}')):
        assert await refused_by(compiling, nothing) == "no text matches it"


async def test_what_would_crash_the_server_or_keep_it_busy_ends_a_process_beside_it(compiling: Compiling) -> None:
    assert await refused_by(compiling, of("lark", CHAIN)) == (
        "is nested too deeply, or takes more than 1024 MiB to compile"
    )
    endless = of("json_schema", '{"type":"integer","multipleOf":1000003}')
    assert await refused_by(compiling, endless) == "takes more than 1 s of processor time to compile"
    assert json.loads(await compiling.grammar(of("regex", "[0-9]{12}"))), "the next one has a new process"
    pid = compiling._trials.pid
    assert "processor time" in await refused_by(compiling, endless)
    assert compiling._trials.pid == pid, "what it was is remembered"


async def test_a_constraint_is_compiled_once_and_the_oldest_are_forgotten(
    compiling: Compiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling_module, "MAX_REMEMBERED", 2)
    first = await compiling.grammar(of("regex", "a"))
    assert first == compile_grammar(of("regex", "a"))
    await compiling.grammar(of("regex", "b"))
    await compiling.grammar(of("regex", "a"))
    await compiling.grammar(of("regex", "c"))
    assert [one.text for one in compiling._known] == ["a", "c"]


async def test_only_so_many_wait(compiling: Compiling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling_module, "MAX_WAITING", 0)
    with pytest.raises(ResourceExhausted, match="0 grammars wait to be compiled"):
        await compiling.grammar(of("regex", "a"))


def test_a_coordinator_that_compiles_grammars_needs_no_arrays_and_no_llguidance_of_its_own() -> None:
    script = (
        "import sys, asyncio; from coordinator.text import ByteCodec, Tokenizing\n"
        "from coordinator.constraints import *\n"
        "tokenizing = Tokenizing(ByteCodec())\n"
        "print(asyncio.run(tokenizing.grammar(Constraint(ConstraintKind.REGEX, 'a'))))\n"
        "tokenizing.close(); print(sorted({'numpy', 'torch', 'llguidance'} & sys.modules.keys()))"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60).stdout
    assert out.splitlines() == ['{"grammars":[{"lark_grammar":"start: /a/"}]}', "[]"]
    script = (
        "import sys, llguidance, kvrelay.guidance, coordinator.trial; print({'numpy', 'torch'} & sys.modules.keys())"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60).stdout
    assert out == "set()\n"
