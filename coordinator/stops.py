"""Stop strings over streamed text: held back while they may be beginning, never leaked. Knows no tokens.

The earliest end wins, as if text came one character at a time; at one end the longest stop string. The text is cut at
its first character. One pass over each character (Aho-Corasick), whatever the number of stop strings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """The compiled stop strings of one request; shared by nothing else. Feed text in order until `feed` says hit."""

    __slots__ = ("_depth", "_held", "_next", "_node", "_stop_length")

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._stop_length = [0]
        self._node = 0
        self._held = ""
        for stop in stops:
            self._insert(stop)
        self._link()

    def feed(self, text: str) -> tuple[str, bool]:
        """(text that is certain now, whether a stop string was completed). After a hit nothing more may be fed."""
        node, held = self._node, self._held + text
        start = len(self._held)
        for at in range(start, len(held)):
            node = self._next[node].get(held[at], 0)
            if self._stop_length[node]:
                self._held = ""
                return held[: at + 1 - self._stop_length[node]], True
        self._node = node
        keep = self._depth[node]
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            if char not in self._next[node]:
                self._next[node][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._stop_length.append(0)
            node = self._next[node][char]
        self._stop_length[node] = len(stop)

    def _link(self) -> None:
        """Turns the tree into an automaton: each node knows where to go on when its text does not continue."""
        fail = [0] * len(self._next)
        waiting = deque(self._next[0].values())
        while waiting:
            node = waiting.popleft()
            below = fail[node]
            self._stop_length[node] = self._stop_length[node] or self._stop_length[below]
            for char, child in self._next[node].items():
                fail[child] = self._next[below].get(char, 0)
                waiting.append(child)
            self._next[node] = {**self._next[below], **self._next[node]}
