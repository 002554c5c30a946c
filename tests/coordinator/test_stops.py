"""Stop strings: nothing leaked, nothing lost, whatever the cuts between tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.output import output_texts
from coordinator.stops import StopAutomaton, StopStrings
from coordinator.text import ByteCodec


def stream(stops: Sequence[str], pieces: Sequence[str]) -> tuple[list[str], bool]:
    matcher, out = StopStrings(StopAutomaton(stops)), []
    for piece in pieces:
        text, hit = matcher.feed(piece)
        out.append(text)
        if hit:
            return out, True
    return [*out, matcher.flush()], False


def naive(stops: Sequence[str], text: str) -> tuple[str, bool]:
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)], True
    return text, False


def test_a_stop_string_over_several_tokens_is_never_leaked() -> None:
    assert stream(["DEFGHIJ"], ["DEF", "G", "HI", "J"]) == (["", "", "", ""], True)


def test_held_text_is_sent_whole_at_the_mismatch() -> None:
    assert stream(["DEFGHIJ"], ["DEF", "G", "X"]) == (["", "", "DEFGX", ""], False)


def test_a_stop_string_inside_a_token_cuts_the_token() -> None:
    assert stream(["Pari"], ["in", " Paris now"]) == (["in", " "], True)


def test_held_text_is_flushed_when_the_output_ends() -> None:
    assert stream(["</s>x"], ["a</s", ">"]) == (["a", "", "</s>"], False)


def test_the_earliest_end_wins_where_one_is_the_beginning_of_another() -> None:
    assert stream(["ab", "abc"], ["xab", "c"]) == (["x"], True)
    assert stream(["abc", "bc"], ["xabc"]) == (["x"], True)
    assert stream(["abcd", "bc"], ["xabcd"]) == (["xa"], True)


def test_a_mismatch_may_still_be_the_beginning_of_another_match() -> None:
    assert stream(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", ""], True)


@pytest.mark.parametrize("cut", range(13))
def test_every_cut_of_a_stop_string_of_12_characters(cut: int) -> None:
    stop = "STOP-HERE-42"
    out, hit = stream([stop], ["before " + stop[:cut], stop[cut:] + " after"])
    assert ("".join(out), hit) == ("before ", True)


@settings(max_examples=1000, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_streaming_equals_a_naive_search_over_the_whole_text(stops: list[str], pieces: list[str]) -> None:
    out, hit = stream(stops, pieces)
    text = "".join(pieces)
    expected, expected_hit = naive(stops, text)
    assert ("".join(out), hit) == (expected, expected_hit)


@settings(max_examples=300, deadline=None)
@given(st.text("ab", min_size=1, max_size=4), st.lists(st.text("abc", max_size=3), max_size=8))
def test_no_more_is_held_back_than_could_begin_the_stop_string(stop: str, pieces: list[str]) -> None:
    matcher, seen, sent = StopStrings(StopAutomaton([stop])), "", ""
    for piece in pieces:
        text, hit = matcher.feed(piece)
        seen, sent = seen + piece, sent + text
        if hit:
            return
        held = max(k for k in range(len(stop)) if seen.endswith(stop[:k]))
        assert len(seen) - len(sent) == held


def test_sequences_share_what_is_compiled_and_not_where_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = list[object]()

    def compiling(stops: Sequence[str]) -> StopAutomaton:
        compiled.append(tuple(stops))
        return StopAutomaton(stops)

    monkeypatch.setattr("coordinator.output.StopAutomaton", compiling)
    one, two, three = output_texts(3, ByteCodec().detokenizer, ["ab", "xyz"], frozenset())
    assert compiled == [("ab", "xyz")]
    assert [one.push(ord("a")), two.push(ord("b")), three.push(ord("x"))] == [("", False), ("b", False), ("", False)]
    assert [one.push(ord("b")), two.push(ord("a")), three.push(ord("b"))] == [("", True), ("", False), ("xb", False)]
    assert [one.finish(), two.finish(), three.finish()] == ["", "a", ""]
