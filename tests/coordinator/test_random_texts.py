"""Streamed text is the whole decode, cut at its stop: thousands of random token sequences, special tokens in or out."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from coordinator.output import output_texts
from coordinator.text import BYTE_EOS, ByteCodec, HuggingFaceCodec, TextCodec

SMOLLM2 = Path("~/.cache/kvrelay/models/smollm2-135m-instruct").expanduser()
needs_model = pytest.mark.skipif(not (SMOLLM2 / "tokenizer.json").exists(), reason="SmolLM2 is not pulled")
SEQUENCES = 5000
CUTS = "".join([" .  ", " n't ", "( ", "\t\r\n", "한국어 สวัสดี 👩‍👩‍👧‍👦 🇩🇪 é"])


@dataclass(frozen=True)
class Case:
    """How one sequence is asked for. min_tokens: the text of this many tokens completes no stop string."""

    token_ids: list[int]
    stops: tuple[str, ...] = ()
    skip: bool = True
    include: bool = False
    min_tokens: int = 0


def streamed(codec: TextCodec, case: Case, silent: frozenset[int] = frozenset()) -> tuple[list[str], bool]:
    """(the pieces, whether a stop string ended them), as the dispatcher asks for them."""
    detokenizer = functools.partial(codec.detokenizer, case.skip)
    (output,) = output_texts(1, detokenizer, case.stops, silent, case.include, case.min_tokens)
    pieces = []
    for token_id in case.token_ids:
        text, hit = output.push(token_id)
        pieces.append(text)
        if hit:
            break
    else:
        hit = False
    return [*pieces, output.finish()], hit


def cut(stops: Sequence[str], text: str, include: bool, begin: int = 0) -> str:
    """The text up to the stop string that ends first, the longest of them; looked for from `begin` on."""
    for end in range(begin + 1, len(text) + 1):
        found = [end - len(s) for s in stops if text[:end].endswith(s) and end - len(s) >= begin]
        if found:
            return text[:end] if include else text[: min(found)]
    return text


def sequences(codec: TextCodec, special: Sequence[int], seed: int) -> Iterator[list[int]]:
    """Uniform ids, ids of one or two bytes, real texts; special tokens between them."""
    rng = random.Random(seed)
    short = [i for i in range(codec.vocab_size) if len(codec.token_bytes(i)) <= 2]
    for n in range(SEQUENCES):
        match n % 4:
            case 0:
                ids = [rng.randrange(codec.vocab_size) for _ in range(rng.randrange(1, 30))]
            case 1:
                ids = [rng.choice(short) for _ in range(rng.randrange(1, 30))]
            case _:
                at = rng.randrange(len(CUTS))
                ids = codec.encode(CUTS[at : at + rng.randrange(1, 15)], False)
        for _ in range(rng.randrange(3)):
            ids.insert(rng.randrange(len(ids) + 1), rng.choice(special))
        yield ids


def stops_of(rng: random.Random, text: str) -> tuple[str, ...]:
    """Pieces of the text itself, so that they are found at every cut, and some that never are."""
    stops = []
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(text)) if text else 0
        stop = text[at : at + rng.randrange(1, 8)] or "?"
        stops.append(stop if rng.random() < 0.7 else stop + "\x07")
    return tuple(stops)


def check_codec(codec: TextCodec, special: Sequence[int], full: dict[bool, Tokenizer | None]) -> None:
    rng = random.Random(9)
    for ids in sequences(codec, special, 5):
        for skip in (True, False):
            library = full[skip]
            whole = codec.decode(ids, skip)
            if library is not None:
                assert whole == library.decode(ids, skip_special_tokens=skip)
            pieces, _ = streamed(codec, Case(ids, skip=skip))
            assert "".join(pieces) == whole
            stops, include = stops_of(rng, whole), rng.random() < 0.5
            pieces, hit = streamed(codec, Case(ids, stops, skip, include))
            assert "".join(pieces) == cut(stops, whole, include)
            assert not hit or any(stop in whole for stop in stops)


def test_random_bytes_stream_as_their_whole_decode_cut_at_its_stop() -> None:
    codec = ByteCodec()
    check_codec(codec, [256, 257], {True: None, False: None})
    assert codec.decode([257, 72, 105, 256], False) == "<bos>Hi<eos>"
    assert codec.decode([257, 72, 105, 256]) == "Hi"


@needs_model
@pytest.mark.model
def test_random_tokens_of_smollm2_stream_as_the_librarys_decode_cut_at_its_stop() -> None:
    codec = HuggingFaceCodec(SMOLLM2, 49152)
    library = Tokenizer.from_file(str(SMOLLM2 / "tokenizer.json"))
    special = [i for i, token in library.get_added_tokens_decoder().items() if token.special]
    check_codec(codec, special, {True: library, False: library})


@needs_model
@pytest.mark.model
def test_one_token_alone_has_its_bytes_and_a_special_one_its_name() -> None:
    codec = HuggingFaceCodec(SMOLLM2, 49152)
    assert b"".join(codec.token_bytes(i) for i in codec.encode("né 👩!", False)) == "né 👩!".encode()
    assert (codec.token_bytes(2), codec.decode([2]), codec.decode([2], False)) == (b"<|im_end|>", "", "<|im_end|>")
    for outside in (-1, 49152, 2**40):
        with pytest.raises(IndexError):
            codec.token_bytes(outside)


def test_a_stop_string_is_part_of_the_text_once_where_it_was_asked_for() -> None:
    ids = list(b"before STOP-HERE after")
    for size in range(1, 8):
        pieces = [ids[at : at + size] for at in range(0, len(ids), size)]
        assert [i for piece in pieces for i in piece] == ids
        text, hit = streamed(ByteCodec(), Case(ids, ("STOP-HERE",), include=True))
        assert ("".join(text), hit) == ("before STOP-HERE", True)


def test_with_the_stop_string_in_the_text_nothing_is_held_back() -> None:
    pieces, hit = streamed(ByteCodec(), Case(list(b"abcabd"), ("abd",), include=True))
    assert (pieces, hit) == (["a", "b", "c", "a", "b", "d", ""], True)


@pytest.mark.parametrize(
    ("last", "skip", "include", "text"),
    [
        (BYTE_EOS, True, False, "injur"),
        (BYTE_EOS, True, True, "injur"),
        (BYTE_EOS, False, False, "injur"),
        (BYTE_EOS, False, True, "injur<eos>"),
        (ord("y"), True, False, "injur"),
        (ord("y"), True, True, "injury"),
        (ord("y"), False, True, "injury"),
    ],
)
def test_the_text_of_a_stop_token_is_in_once_or_not_at_all(last: int, skip: bool, include: bool, text: str) -> None:
    case = Case([*b"injur", last], skip=skip, include=include)
    pieces, hit = streamed(ByteCodec(), case, silent=frozenset({BYTE_EOS, ord("y")}))
    assert ("".join(pieces), hit) == (text, False)


@pytest.mark.parametrize("least", range(4))
def test_a_token_that_ends_the_sequence_has_no_text_before_min_tokens_either(least: int) -> None:
    silent = frozenset({ord("o")})
    assert streamed(ByteCodec(), Case(list(b"no"), min_tokens=least), silent)[0] == ["n", "", ""]
    assert streamed(ByteCodec(), Case(list(b"no"), include=True, min_tokens=least), silent)[0] == ["n", "o", ""]


def test_a_token_without_text_counts_towards_the_first_ones() -> None:
    case = Case(list(b"oab"), ("ab",), min_tokens=1)
    assert streamed(ByteCodec(), case, silent=frozenset({ord("o")})) == (["", "", "", ""], True)


def test_stop_strings_are_looked_for_behind_the_first_tokens() -> None:
    stops, ids = ("ab",), list(b"abxabab")
    for least, text in ((0, ""), (1, "abx"), (2, "abx"), (3, "abx"), (4, "abxab"), (5, "abxab"), (6, "abxabab")):
        pieces, hit = streamed(ByteCodec(), Case(ids, stops, min_tokens=least))
        assert ("".join(pieces), hit) == (text, least < 6)
        assert text == cut(stops, "abxabab", False, least)
