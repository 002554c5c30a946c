"""Stop strings over streamed text: held back while they may be beginning, never leaked. Knows no tokens.

The earliest end wins, as if text came one character at a time; at one end the longest stop string. The text is cut at
its first character. One pass over each character (Aho-Corasick), whatever the number of stop strings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopAutomaton:
    """The compiled stop strings of one request: its sequences share it, each with a StopStrings of its own.

    next: of each node, the node that a character leads to. depth: characters of its text. stop_length: of the longest
    stop string that ends there, 0 if none does.
    """

    __slots__ = ("depth", "next", "stop_length")

    def __init__(self, stops: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.stop_length = [0]
        for stop in stops:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            if char not in self.next[node]:
                self.next[node][char] = len(self.next)
                self.next.append({})
                self.depth.append(self.depth[node] + 1)
                self.stop_length.append(0)
            node = self.next[node][char]
        self.stop_length[node] = len(stop)

    def _link(self) -> None:
        """Turns the tree into an automaton: each node knows where to go on when its text does not continue."""
        fail = [0] * len(self.next)
        waiting = deque(self.next[0].values())
        while waiting:
            node = waiting.popleft()
            below = fail[node]
            self.stop_length[node] = self.stop_length[node] or self.stop_length[below]
            for char, child in self.next[node].items():
                fail[child] = self.next[below].get(char, 0)
                waiting.append(child)
            self.next[node] = {**self.next[below], **self.next[node]}


class StopStrings:
    """Where one text stands. Feed it in order until `feed` says hit.

    include: the stop string is part of the text, so that nothing need be held back, and the text is cut after it.
    """

    __slots__ = ("_automaton", "_held", "_include", "_node")

    def __init__(self, automaton: StopAutomaton, include: bool = False) -> None:
        self._automaton = automaton
        self._include = include
        self._node = 0
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """(text that is certain now, whether a stop string was completed). After a hit nothing more may be fed."""
        following, stop_length = self._automaton.next, self._automaton.stop_length
        node, held = self._node, self._held + text
        for at in range(len(self._held), len(held)):
            node = following[node].get(held[at], 0)
            if stop_length[node]:
                self._held = ""
                return held[: at + 1 - (0 if self._include else stop_length[node])], True
        self._node = node
        keep = 0 if self._include else self._automaton.depth[node]
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held, self._node = self._held, "", 0
        return held
