"""Grammars: which tokens may follow, whatever is kept of a sequence; and answers held to them, of a whole engine."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specs import key, sequences_of, spec
from tokenizers import Tokenizer

import engine.grammars as grammars_module
import kvrelay.guidance as guidance_module
from coordinator.constraints import Constraint, ConstraintKind, compile_grammar
from coordinator.text import HuggingFaceCodec
from engine.block_pool import BlockPool
from engine.budgets import Budgets
from engine.events import Failed, Finished, Preempted, Sampled
from engine.grammars import Grammars
from engine.hash_executor import HashExecutor
from engine.local import LocalEngine
from engine.plan import Past
from engine.sampler import Draw, GrammarFailed
from engine.scheduler import Scheduler
from engine.token_ids import TokenIds
from kvrelay.errors import NotFound
from kvrelay.guidance import byte_tokenizer
from kvrelay.models.catalog import resolve
from kvrelay.models.config import ModelConfig
from kvrelay.requests import FinishReason, Sampling, SequenceKey, SequenceSpec

EOS = 256
DIGITS = set(b"0123456789")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b\n", "é"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CHOICES = ("yes", "no", "yesterday", "ja\nnein", '"quoted\\"', "día 😀")
GBNF = 'root ::= item ("," item){0,3}\nitem ::= [a-c] [0-9]? "\\u00e9"?'
LARK = 'start: "<" WORD (" " WORD)* ">"\nWORD: /[a-z]{1,4}/'


def compiled(kind: str, text: str = "", choices: tuple[str, ...] = ()) -> str:
    return compile_grammar(Constraint(ConstraintKind(kind), text, choices))


def regex(pattern: str) -> str:
    return compiled("regex", pattern)


def draw(grammar: str, output: Sequence[int] = (), name: str | None = None) -> Draw:
    past = Past(TokenIds.of(output))
    return Draw(Sampling(grammar=grammar), len(output), past, None if name is None else key(name))


def allowed(grammars: Grammars, grammar: str, output: Sequence[int] = (), name: str | None = None) -> set[int]:
    row = np.arange(258, dtype=np.float32)
    grammars.disallow(row, draw(grammar, output, name))
    kept = np.isfinite(row)
    assert (row[kept] == np.arange(258)[kept]).all(), "what is allowed keeps its logit"
    assert (row[~kept] == -np.inf).all()
    return set(np.flatnonzero(kept).tolist())


@pytest.fixture
def of_bytes() -> Grammars:
    return Grammars.of_bytes(258, EOS)


def test_only_what_the_grammar_allows_next_keeps_its_logit(of_bytes: Grammars) -> None:
    assert allowed(of_bytes, regex("[0-9]{2}")) == DIGITS
    assert allowed(of_bytes, regex("[0-9]{2}"), b"4") == DIGITS


def test_the_end_is_allowed_where_the_text_is_complete_and_nowhere_else(of_bytes: Grammars) -> None:
    pattern = regex("ab?")
    assert allowed(of_bytes, pattern) == {ord("a")}
    assert allowed(of_bytes, pattern, b"a") == {ord("b"), EOS}
    assert allowed(of_bytes, pattern, b"ab") == {EOS}


def test_after_an_end_that_was_ignored_nothing_but_the_end_is_allowed(of_bytes: Grammars) -> None:
    assert allowed(of_bytes, regex("ab?"), (97, EOS)) == {EOS}
    assert allowed(of_bytes, regex("ab?"), (97, EOS, EOS), "one") == {EOS}


def test_every_id_that_ends_a_text_is_allowed_at_its_end_and_no_id_without_a_token_ever() -> None:
    grammars = Grammars(lambda: byte_tokenizer(300, EOS), 300, [EOS, 257, 299])
    row = np.zeros(300, np.float32)
    grammars.disallow(row, draw(regex("(?s).*")))
    assert set(np.flatnonzero(row == 0).tolist()) == {*allowed(Grammars.of_bytes(258, EOS), regex("(?s).*")), 257, 299}


def test_what_the_grammar_forbids_in_the_output_is_a_failure_in_words(of_bytes: Grammars) -> None:
    with pytest.raises(GrammarFailed, match=r"the grammar cannot be followed: .*doesn't satisfy the grammar"):
        of_bytes.disallow(np.zeros(258, np.float32), draw(regex("[0-9]+"), b"1x", "one"))
    assert allowed(of_bytes, regex("[0-9]+"), b"1", "one") == {*DIGITS, EOS}, "nothing of it is kept"


def test_a_grammar_that_nothing_matches_or_that_is_none_fails(of_bytes: Grammars) -> None:
    for grammar in (regex(r"[^\s\S]"), '{"grammars":[{"lark_grammar":"start: /(/"}]}', "{"):
        with pytest.raises(GrammarFailed):
            of_bytes.disallow(np.zeros(258, np.float32), draw(grammar))


def test_a_sequence_without_a_matcher_gets_the_same_masks(of_bytes: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "MAX_MATCHERS", 2)
    monkeypatch.setattr(grammars_module, "MAX_COMPILED", 1)
    patterns = [regex(f"[0-9]{{3}}{end}") for end in "abc"]
    for length in range(5):
        for i, pattern in enumerate(patterns):
            output = (b"123" + b"abc"[i : i + 1])[:length]
            expected = DIGITS if length < 3 else {b"abc"[i]} if length == 3 else {EOS}
            assert allowed(of_bytes, pattern, output, f"seq {i}") == expected
        assert (len(of_bytes._matchings), len(of_bytes._compiled)) == (2 if length < 4 else 0, 1)


def test_nothing_is_kept_of_a_sequence_that_can_only_end_or_has_failed(of_bytes: Grammars) -> None:
    pattern = regex("ab?")
    assert allowed(of_bytes, pattern, b"a", "one") == {ord("b"), EOS} and key("one") in of_bytes._matchings
    assert allowed(of_bytes, pattern, b"ab", "one") == {EOS} and not of_bytes._matchings
    assert allowed(of_bytes, pattern, b"ab", "one") == {EOS}, "it may be asked again"
    assert allowed(of_bytes, pattern, b"a", "two") and of_bytes._matchings
    with pytest.raises(GrammarFailed):
        allowed(of_bytes, pattern, b"ax", "two")
    assert not of_bytes._matchings


def test_a_grammar_that_can_be_read_in_ever_more_ways_fails_at_the_items_of_one_token(
    of_bytes: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guidance_module, "MAX_STEP_ITEMS", 200)
    ambiguous = compiled("lark", "start: s\ns: /[a-z]/ | s s | s s s | ")
    for length in range(38):
        assert allowed(of_bytes, ambiguous, b"z" * length, "one") == {*b"abcdefghijklmnopqrstuvwxyz", EOS}
    with pytest.raises(GrammarFailed, match=r"cannot be followed: parser error: Too many items \(limit 200; mask\)"):
        allowed(of_bytes, ambiguous, b"z" * 38, "one")


def test_a_sequence_whose_masks_take_half_a_second_more_than_is_usual_fails_and_no_other_does() -> None:
    now, took = 0.0, 0.02

    def clock() -> float:
        nonlocal now
        now += took
        return now

    grammars = Grammars(lambda: byte_tokenizer(258, EOS), 258, [EOS], clock)
    pattern = regex("[0-9]+")
    for length in range(100):
        assert allowed(grammars, pattern, b"7" * length, "usual") == (DIGITS if length == 0 else {*DIGITS, EOS})
    took = 0.15  # 0.13 s more than is usual for a mask, 0.11 s for one after a token
    for length in range(4):
        allowed(grammars, pattern, b"7" * length, "slow")
    with pytest.raises(GrammarFailed, match="takes too much processor time"):
        allowed(grammars, pattern, b"7777", "slow")
    assert allowed(grammars, pattern, b"7" * 100, "usual") == {*DIGITS, EOS}


def test_a_key_that_comes_again_with_less_output_or_another_grammar_begins_anew(of_bytes: Grammars) -> None:
    assert allowed(of_bytes, regex("ab"), b"ab", "one") == {EOS}
    assert allowed(of_bytes, regex("ab"), b"", "one") == {ord("a")}
    assert allowed(of_bytes, regex("xy"), b"x", "one") == {ord("y")}


patterns = st.recursive(
    st.sampled_from(["a", "b", "ab", "[a-c]", "é", r"\d", ".", "[^a]"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"({two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}"])).map(lambda two: f"({two[0]}){two[1]}"),
    ),
    max_leaves=8,
)
random_grammars = st.one_of(
    patterns.map(regex),
    patterns.map(lambda inner: compiled("lark", f'start: item+\nitem: /{inner}/ | start_of\nstart_of: "(" item ")"')),
    st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=5).map(
        lambda some: compiled("choice", "", tuple(some))
    ),
    st.sampled_from([PERSON, {"type": "object"}, {}, {"type": "array", "items": {"type": "number"}}]).map(
        lambda schema: compiled("json_schema", json.dumps(schema))
    ),
)


GRAMMARS = Grammars.of_bytes(258, EOS)


@settings(max_examples=100, deadline=None)
@given(random_grammars, st.integers(0, 2**32))
def test_a_matcher_that_went_along_and_one_made_anew_allow_the_same(grammar: str, seed: int) -> None:
    chance = random.Random(seed)
    along, output = GRAMMARS, []
    for _ in range(chance.randint(1, 40)):
        kept = allowed(along, grammar, output, "along")
        assert kept == allowed(GRAMMARS, grammar, output), "one made anew"
        output.append(chance.choice(sorted(kept)))
        if output[-1] == EOS:
            break
        if chance.random() < 0.2:
            continue  # the next draw finds a matcher that is two tokens behind
        allowed(along, grammar, output, "along")


def hash_engine(num_blocks: int = 512, block_size: int = 16) -> LocalEngine:
    executor = HashExecutor(num_blocks, block_size, eos_token_id=EOS, grammars=Grammars.of_bytes(258, EOS))
    return LocalEngine(executor, Scheduler(BlockPool(num_blocks), block_size, Budgets()))


def held(name: str, grammar: str, seed: int, max_tokens: int = 400, **more: object) -> SequenceSpec:
    sampling = Sampling(temperature=1.0, seed=seed, grammar=grammar)
    return replace(spec(name, 9 + seed % 3, max_tokens, sampling, stop=[EOS]), **more)


def answers(engine: LocalEngine, specs: Sequence[SequenceSpec]) -> dict[SequenceKey, str]:
    """The texts; every one of them must end by itself."""
    outputs: dict[SequenceKey, list[int]] = {}
    ended: dict[SequenceKey, FinishReason] = {}
    for event in engine.stream(specs):
        assert not isinstance(event, Failed), event
        if isinstance(event, Sampled):
            outputs.setdefault(event.key, []).append(event.token_id)
        if isinstance(event, Finished):
            ended[event.key] = event.reason
    assert set(ended.values()) == {FinishReason.STOP} and ended.keys() == outputs.keys()
    assert all(output.pop() == EOS for output in outputs.values())
    return {one: bytes(output).decode() for one, output in outputs.items()}


def fifty(grammar: str) -> list[str]:
    return list(answers(hash_engine(), [held(f"r{seed}", grammar, seed) for seed in range(50)]).values())


def test_twelve_digits_are_twelve_digits_for_every_seed() -> None:
    texts = fifty(regex("[0-9]{12}"))
    assert all(re.fullmatch("[0-9]{12}", text) for text in texts)
    assert len(set(texts)) == 50


def test_every_answer_of_a_schema_is_json_and_an_instance_of_it() -> None:
    texts = fifty(compiled("json_schema", json.dumps(PERSON)))
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)
    assert len(set(texts)) == 50


def test_every_answer_is_one_of_the_choices_and_each_of_them_comes_up() -> None:
    assert set(fifty(compiled("choice", choices=CHOICES))) == set(CHOICES)


def test_every_answer_of_a_grammar_in_either_notation_matches_it() -> None:
    assert all(re.fullmatch("[a-c][0-9]?é?(,[a-c][0-9]?é?){0,3}", text) for text in fifty(compiled("ebnf", GBNF)))
    assert all(re.fullmatch("<[a-z]{1,4}( [a-z]{1,4})*>", text) for text in fifty(compiled("lark", LARK)))


def test_each_of_four_sequences_that_share_a_prompt_follows_the_grammar_on_its_own() -> None:
    one = held("four", compiled("json_schema", json.dumps(PERSON)), 3, n=4)
    together = answers(hash_engine(), [one])
    assert together == answers(hash_engine(), sequences_of(one))
    assert len(set(together.values())) == 4
    for text in together.values():
        jsonschema.validate(json.loads(text), PERSON)


def test_sequences_that_gave_way_and_came_back_say_what_they_say_undisturbed() -> None:
    grammars = [regex("[0-9]{12}"), compiled("json_schema", json.dumps(PERSON)), compiled("ebnf", GBNF)]
    specs = [held(f"r{i}", grammars[i % 3], i, 80) for i in range(12)]
    small = hash_engine(24, 4)
    events: list[object] = []
    apply = small.scheduler.apply
    small.scheduler.apply = lambda plan, result: events.extend(got := apply(plan, result)) or got  # type: ignore[method-assign]
    assert answers(small, specs) == answers(hash_engine(512, 4), specs)
    assert any(isinstance(event, Preempted) for event in events)


@pytest.mark.parametrize("at", [1, 5, 11, 12])
def test_a_sequence_that_goes_on_elsewhere_ends_as_it_would_have_here(at: int) -> None:
    grammar = regex("[0-9]{12}")
    whole = hash_engine().generate([held("moved", grammar, 1)])[key("moved")]
    assert len(whole) == 13
    rest = hash_engine().generate([held("moved", grammar, 1, token_ids=spec("moved", 10).token_ids + whole[:at])])
    assert rest[key("moved")] == whole[at:]


@pytest.fixture(scope="module")
def smollm2() -> Path:
    try:
        return resolve("smollm2-135m-instruct")
    except NotFound as error:
        pytest.skip(error.message)


@pytest.mark.model
def test_tokens_of_a_real_model_stand_for_the_bytes_that_are_streamed(smollm2: Path) -> None:
    facts = ModelConfig.from_dir(smollm2)
    grammars = Grammars.of_directory(smollm2, facts.vocab + 64, facts.eos_ids)
    row = np.zeros(facts.vocab + 64, np.float32)
    grammars.disallow(row, draw(regex("(?s).*")))
    codec = HuggingFaceCodec(smollm2, facts.vocab)
    ids = np.flatnonzero(row == 0).tolist()
    assert len(ids) > 48_000 and max(ids) < facts.vocab and set(facts.eos_ids) <= set(ids)
    assert all(grammars._tokenizer.decode_bytes([i]) == codec.token_bytes(i) for i in ids if i not in facts.eos_ids)


@pytest.mark.model
def test_an_object_of_a_hundred_optional_properties_is_not_too_much_for_a_real_vocabulary(smollm2: Path) -> None:
    facts = ModelConfig.from_dir(smollm2)
    grammars = Grammars.of_directory(smollm2, facts.vocab, facts.eos_ids)
    properties = {f"prop{i}": {"type": ["string", "null", "integer"]} for i in range(100)}
    grammar = compiled("json_schema", json.dumps({"type": "object", "properties": properties}))
    encode = Tokenizer.from_file(str(smollm2 / "tokenizer.json")).encode
    for text in ("", "{", '{"', '{"prop1": 1', '{"prop1": 1,', '{"prop1": 1, "prop2": "a", "'):
        row = np.zeros(facts.vocab, np.float32)
        grammars.disallow(row, draw(grammar, encode(text).ids))
        assert (row == 0).any()


@pytest.mark.model
@pytest.mark.timeout(600)
def test_a_real_model_says_json_of_the_schema_and_one_of_the_choices(smollm2: Path) -> None:
    from engine.torch_executor import TorchExecutor, TorchOptions

    facts = ModelConfig.from_dir(smollm2)
    executor = TorchExecutor(
        smollm2,
        TorchOptions("float32", 128, 16, 1),
        grammars=Grammars.of_directory(smollm2, facts.vocab, facts.eos_ids),
    )
    engine = LocalEngine(executor, Scheduler(BlockPool(128), 16, Budgets()))
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    prompt = tokenizer.encode("A person as JSON: ").ids
    kinds = [compiled("json_schema", json.dumps(PERSON)), compiled("choice", choices=CHOICES)]
    specs = [
        spec(f"r{i}", prompt, 200, Sampling(temperature=1.0, seed=i, grammar=kinds[i % 2]), stop=facts.eos_ids)
        for i in range(4)
    ]
    outputs = engine.generate(specs)
    executor.close()
    assert all(output[-1] in facts.eos_ids for output in outputs.values())
    texts = [tokenizer.decode(list(outputs[one.key])) for one in specs]
    for text in texts[::2]:
        jsonschema.validate(json.loads(text), PERSON)
    assert set(texts[1::2]) <= set(CHOICES)
