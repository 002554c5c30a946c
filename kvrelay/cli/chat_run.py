"""A conversation, turn by turn: what was said is answered or obeyed. Knows neither terminal nor channel.

An answer that Ctrl-C ended stays in the conversation as far as it came, so that the model knows what the user saw.
What failed, and what was cancelled before its first text, leaves no trace in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvrelay.cli.chat_commands import is_command, run_command
from kvrelay.cli.chat_history import Conversation
from kvrelay.cli.chat_lines import Lines
from kvrelay.cli.chat_view import View
from kvrelay.client import ChatMessage, Client, GenerateOptions, GenerateResult
from kvrelay.errors import FailedPrecondition, InvalidArgument, KVRelayError

Voice = Callable[[Sequence[ChatMessage], Callable[[str], None]], GenerateResult]
"""Answers messages and tells each piece of the text as it comes; raises KVRelayError. Ctrl-C cancels the call."""
MAX_TOKENS = 512
TOO_LONG = ("chat", "max_tokens")
"""Fields of the refusals of a prompt that leaves no room in the context."""


def chat(target: str, options: GenerateOptions, system: str, as_json: bool) -> int:
    """Converses until the input ends. The exit code: 1 if a turn of a pipe failed. Raises if nobody can be asked."""
    lines, view = Lines(), View(as_json)
    with Client(target) as client:
        info = client.get_model(options.get("model", ""))
        if not info.chat_template:
            raise FailedPrecondition(f"model {info.model_id} has no chat template: see kvrelay generate", field="model")
        if options.get("max_tokens") is None:
            options = {**options, "max_tokens": min(MAX_TOKENS, max(1, info.context_limit // 2))}
        if lines.interactive:
            view.note(f"{info.model_id}, context of {info.context_limit} tokens. /help shows commands, Ctrl-D leaves.")
        talk = Talk(cluster_voice(client, options), Conversation(system), view)
        try:
            while (said := lines.turn()) is not None and talk.take(said):
                pass
        except KeyboardInterrupt:
            view.note("")
    return 1 if talk.num_failed and not lines.interactive else 0


def cluster_voice(client: Client, options: GenerateOptions) -> Voice:
    def ask(messages: Sequence[ChatMessage], heard: Callable[[str], None]) -> GenerateResult:
        with client.generate(messages, **options) as stream:
            for token in stream:
                heard(token.text)
            return stream.result

    return ask


class Talk:
    def __init__(self, voice: Voice, conversation: Conversation, view: View) -> None:
        self._voice = voice
        self._conversation = conversation
        self._view = view
        self._pieces: list[str] = []
        self.num_failed = 0

    def take(self, said: str) -> bool:
        """Answers or obeys; False: the user leaves. Errors are shown."""
        try:
            if not is_command(said):
                self._turn(said[1:] if said.startswith("//") else said)
                return True
            told = run_command(said, self._conversation)
        except KVRelayError as error:
            self.num_failed += 1
            self._view.failed(error)
            return True
        if told is not None:
            self._view.note(told)
        return told is not None

    def _turn(self, said: str) -> None:
        conversation, view = self._conversation, self._view
        number = len(conversation.turns) + 1
        self._pieces.clear()
        try:
            result = self._answer(said)
        except KeyboardInterrupt:
            text = "".join(self._pieces)
            if text:
                conversation.add(said, text)
            view.cancelled(number, conversation.num_left_out, text)
            return
        conversation.add(said, result.text)
        view.answered(number, conversation.num_left_out, result)

    def _answer(self, said: str) -> GenerateResult:
        """Leaves out the oldest turns until the rest fits; only if some rest does, so that no error costs them."""
        conversation, num_left_out = self._conversation, self._conversation.num_left_out
        while True:

            def heard(piece: str, num_left_out: int = num_left_out) -> None:
                self._leave_out(num_left_out)
                self._pieces.append(piece)
                self._view.text(piece)

            try:
                return self._voice(conversation.prompt(said, num_left_out), heard)
            except InvalidArgument as error:
                if error.field not in TOO_LONG or num_left_out == len(conversation.turns):
                    raise
                num_left_out += 1

    def _leave_out(self, num_turns: int) -> None:
        if num_turns > self._conversation.num_left_out:
            self._conversation.num_left_out = num_turns
            turns = "turn is" if num_turns == 1 else f"{num_turns} turns are"
            self._view.note(f"the context is full: the oldest {turns} no longer sent")
