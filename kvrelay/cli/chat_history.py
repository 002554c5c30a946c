"""What was said in a conversation, and what of it the model is told again. Knows no terminal and no client."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvrelay.client.options import ChatMessage


class Turn(NamedTuple):
    user: str
    assistant: str


@dataclass(slots=True)
class Conversation:
    """num_left_out: so many of the oldest turns are no longer sent, as the context was full. They are kept still."""

    system: str = ""
    turns: list[Turn] = field(default_factory=list)
    num_left_out: int = 0

    def prompt(self, said: str, num_left_out: int) -> list[ChatMessage]:
        """What is sent for the next turn: the system message, the turns but the oldest, what was said now."""
        return [*self._messages(num_left_out), {"role": "user", "content": said}]

    def transcript(self) -> list[ChatMessage]:
        """All of it."""
        return self._messages(0)

    def add(self, said: str, answer: str) -> None:
        self.turns.append(Turn(said, answer))

    def undo(self) -> Turn | None:
        """Takes the last turn back; None if there is none."""
        if not self.turns:
            return None
        turn = self.turns.pop()
        self.num_left_out = min(self.num_left_out, len(self.turns))
        return turn

    def reset(self) -> None:
        """Forgets all turns, not the system message."""
        self.turns.clear()
        self.num_left_out = 0

    def _messages(self, num_left_out: int) -> list[ChatMessage]:
        messages: list[ChatMessage] = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns[num_left_out:]:
            messages += ({"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.assistant})
        return messages
