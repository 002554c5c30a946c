"""A conversation: what is sent with each turn, what commands do, what is shown, how answers may end badly."""

from __future__ import annotations

import io
import json

import pytest

from kvrelay.cli import chat_run
from kvrelay.cli.chat_commands import HELP, is_command, run_command
from kvrelay.cli.chat_history import Conversation, Turn
from kvrelay.cli.chat_lines import Lines
from kvrelay.cli.chat_view import View, timing_line
from kvrelay.client import Choice, GenerateResult, HandOff, Usage
from kvrelay.errors import InvalidArgument, NotFound, Unavailable


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "be brief"}


def result_of(text: str, tail: str = "", **fields) -> GenerateResult:
    facts = {"usage": Usage(9, 2, 4), "ttft_ms": 82.4, "gaps_ms": (13.94,), "finish_reason": "stop"} | fields
    facts = {"prefill_worker": "prefill-0", "decode_worker": "decode-1", "hand_off": None} | facts
    choice = Choice(sequence=0, token_ids=(1, 2), text=text, tail=tail, **facts)
    return GenerateResult.of("r1", 7, "m", [choice])


class Voice:
    """Answers what was said last, in two pieces and a tail. The room: so many messages fit."""

    def __init__(self, room: int = 1000) -> None:
        self.room = room
        self.heard: list[list[dict[str, str]]] = []

    def __call__(self, messages, heard):
        self.heard.append(list(messages))
        said = messages[-1]["content"]
        if len(messages) > self.room:
            raise InvalidArgument("chat: has 99 tokens; a prompt has 1 .. 63 (context - 1)", field="chat")
        if said == "refuse":
            raise InvalidArgument("sampling.top_p must be above 0", field="sampling.top_p")
        if said == "stop at once":
            raise KeyboardInterrupt
        heard("so ")
        heard(said)
        if said == "break":
            raise Unavailable("worker decode-0 was lost")
        if said == "stop":
            raise KeyboardInterrupt
        return result_of(f"so {said}!", "!")


def talk_of(voice: Voice, conversation: Conversation | None = None, as_json: bool = False):
    return chat_run.Talk(voice, conversation or Conversation(), View(as_json))


def test_each_turn_sends_the_system_message_and_all_that_was_said():
    voice, conversation = Voice(), Conversation("be brief")
    talk = talk_of(voice, conversation)
    assert talk.take("one") and talk.take("two")
    assert voice.heard == [
        [SYSTEM, user("one")],
        [SYSTEM, user("one"), assistant("so one!"), user("two")],
    ]
    assert conversation.turns == [Turn("one", "so one!"), Turn("two", "so two!")]


def test_answers_are_on_stdout_and_what_is_said_of_them_on_stderr(capsys):
    talk_of(Voice()).take("one")
    out, err = capsys.readouterr()
    assert out == "so one!\n"
    line = (
        "2 tokens · first 82 ms (4 of 9 prompt tokens cached) · 13.9 ms a token, slowest 13.9 ms · "
        "prefill-0 -> decode-1\n"
    )
    assert err == line


def test_with_json_each_turn_is_one_object_and_stderr_stays_empty(capsys):
    talk = talk_of(Voice(), as_json=True)
    talk.take("one")
    talk.take("stop")
    out, err = capsys.readouterr()
    first, second = map(json.loads, out.splitlines())
    assert (first["turn"], first["left_out"], first["text"], first["token_ids"]) == (1, 0, "so one!", [1, 2])
    assert second == {"turn": 2, "left_out": 0, "cancelled": True, "text": "so stop"}
    assert err == ""


def test_a_cancelled_answer_stays_as_far_as_it_came(capsys):
    voice, conversation = Voice(), Conversation()
    talk = talk_of(voice, conversation)
    assert talk.take("stop")
    assert conversation.turns == [Turn("stop", "so stop")]
    out, err = capsys.readouterr()
    assert (out, err) == ("so stop\n", "cancelled; what came of it stays in the conversation\n")
    assert talk.take("stop at once")
    assert conversation.turns == [Turn("stop", "so stop")]
    assert capsys.readouterr() == ("", "cancelled before it began\n")


def test_a_turn_that_fails_is_told_and_forgotten_and_the_conversation_goes_on(capsys):
    voice, conversation = Voice(), Conversation()
    talk = talk_of(voice, conversation)
    assert talk.take("refuse") and talk.take("break") and talk.take("one")
    assert conversation.turns == [Turn("one", "so one!")]
    assert talk.num_failed == 2
    out, err = capsys.readouterr()
    assert out == "so break\nso one!\n"
    assert err.splitlines()[:2] == ["kvrelay: sampling.top_p must be above 0", "kvrelay: worker decode-0 was lost"]


def test_the_oldest_turns_are_left_out_when_the_context_is_full(capsys):
    voice, conversation = Voice(room=4), Conversation("be brief")
    talk = talk_of(voice, conversation)
    for said in "abc":
        assert talk.take(said)
    assert voice.heard[-2:] == [
        [SYSTEM, user("a"), assistant("so a!"), user("b"), assistant("so b!"), user("c")],
        [SYSTEM, user("b"), assistant("so b!"), user("c")],
    ]
    assert (conversation.num_left_out, len(conversation.turns)) == (1, 3)
    assert "the context is full: the oldest turn is no longer sent\n" in capsys.readouterr().err
    talk.take("d")
    assert voice.heard[-1] == [SYSTEM, user("c"), assistant("so c!"), user("d")]
    assert "the context is full: the oldest 2 turns are no longer sent\n" in capsys.readouterr().err
    assert conversation.transcript()[1] == user("a")


def test_what_does_not_fit_alone_costs_no_turn():
    voice, conversation = Voice(room=0), Conversation(turns=[Turn("a", "b")])
    talk = talk_of(voice, conversation)
    assert talk.take("c")
    assert (conversation.turns, conversation.num_left_out, talk.num_failed) == ([Turn("a", "b")], 0, 1)
    assert [len(messages) for messages in voice.heard] == [3, 1]


def test_commands_change_the_conversation_and_two_slashes_are_a_message(capsys):
    voice, conversation = Voice(), Conversation()
    talk = talk_of(voice, conversation)
    for said in ("/system  be brief ", "one", "two", "/undo", "//path", "/reset", "three"):
        assert talk.take(said)
    assert voice.heard[2] == [SYSTEM, user("one"), assistant("so one!"), user("/path")]
    assert voice.heard[3] == [SYSTEM, user("three")]
    told = [line for line in capsys.readouterr().err.splitlines() if "·" not in line]
    assert told == ["the system message is set", "taken back: two", "all turns are forgotten"]
    assert not talk.take("/exit")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("/help", HELP),
        ("/undo", "there is no turn to take back"),
        ("/system", "there is no system message"),
        ("/exit", None),
        ("/quit", None),
    ],
)
def test_commands_on_an_empty_conversation(said, told):
    assert is_command(said)
    assert run_command(said, Conversation()) == told


@pytest.mark.parametrize("word", ["/help", "/reset", "/undo", "/system", "/save", "/exit"])
def test_the_help_names_every_command(word):
    assert word in HELP


def test_an_unknown_command_and_a_file_that_cannot_be_written_are_errors_that_say_so(tmp_path):
    with pytest.raises(NotFound, match="no command /sing: see /help"):
        run_command("/sing a song", Conversation())
    with pytest.raises(InvalidArgument, match="/save needs the name of a file"):
        run_command("/save ", Conversation())
    with pytest.raises(InvalidArgument, match="Is a directory"):
        run_command(f"/save {tmp_path}", Conversation())


def test_a_saved_conversation_is_a_list_of_messages_also_of_turns_that_are_no_longer_sent(tmp_path):
    conversation = Conversation("be brief", [Turn("grüße", "ja"), Turn("b", "c")], num_left_out=1)
    assert (
        run_command(f"/save {tmp_path / 'a file.json'}", conversation)
        == f"5 messages written to {tmp_path / 'a file.json'}"
    )
    saved = json.loads((tmp_path / "a file.json").read_text(encoding="utf-8"))
    assert saved == [SYSTEM, user("grüße"), assistant("ja"), user("b"), assistant("c")]


def test_taking_turns_back_leaves_out_no_more_than_there_are():
    conversation = Conversation(turns=[Turn("a", "b"), Turn("c", "d")], num_left_out=2)
    assert conversation.undo() == Turn("c", "d")
    assert conversation.num_left_out == 1
    conversation.reset()
    assert (conversation.undo(), conversation.num_left_out) == (None, 0)


@pytest.mark.parametrize(
    ("typed", "turns"),
    [
        ("one\ntwo", ["one", "two"]),
        ("\n  \none\r\n\n", ["one"]),
        ("a\\\nb\\\n\\\nc\nd\n", ["a\nb\n\nc", "d"]),
        ("a\\\n", ["a"]),
        ("", []),
    ],
)
def test_a_pipe_is_a_turn_a_line_and_a_backslash_joins_lines(monkeypatch, typed, turns):
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    lines = Lines()
    assert list(iter(lines.turn, None)) == turns
    assert not lines.interactive


MOVED = HandOff("nixl", 4, 1_400_000, 0.0006, 0.0001)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"usage": Usage(90, 23, 64), "gaps_ms": (10.0, 41.2, 11.9), "hand_off": MOVED},
            "23 tokens · first 82 ms (64 of 90 prompt tokens cached) · 21 ms a token, slowest 41 ms · "
            "prefill-0 -> decode-1 · hand-off 4 blocks 1.4 MB 0.6 ms",
        ),
        (
            {
                "usage": Usage(5, 1, 0),
                "ttft_ms": 9.96,
                "gaps_ms": (),
                "finish_reason": "length",
                "prefill_worker": "decode-1",
            },
            "1 token (--max-tokens) · first 10.0 ms (0 of 5 prompt tokens cached) · decode-1",
        ),
        (
            {"gaps_ms": (), "migrations": 2, "hand_off": HandOff("grpc", 1, 0, 0.0, 0.0)},
            "2 tokens · first 82 ms (4 of 9 prompt tokens cached) · prefill-0 -> decode-1 · "
            "hand-off 1 block 0.0 MB 0.0 ms · moved 2 times as workers were lost",
        ),
    ],
)
def test_the_timing_line_says_what_there_is_to_say(fields, line):
    assert timing_line(result_of("x", **fields)) == line
