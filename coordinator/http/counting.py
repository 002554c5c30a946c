"""How much is in a JSON body, while it comes: parsing it holds all streams for the time it takes. Knows no fields.

Bytes alone do not say it: 8 MB are 20 ms of work as one text and seconds as lists of lists.
"""

from __future__ import annotations

from coordinator.http.errors import Rejected

MAX_VALUES = 262_144
"""Entries of all lists and objects: prompts of token ids need the most."""
MAX_PARTS = 65_536
"""Lists, objects and their named entries, which cost most. A chat of 8,192 messages has 24,577."""


class Counting:
    """Counts what stands outside of strings. Of what is no JSON it counts something, which is bounded too."""

    def __init__(self) -> None:
        self._values = self._parts = 0
        self._in_string = self._escaped = False

    def feed(self, part: bytes) -> None:
        """The next part of the body. Rejected once there is too much."""
        if self._escaped:
            part, self._escaped = part[1:], not part
        # Without its escapes a string ends at the next quote. Pairs of backslashes first: the second of a pair
        # escapes nothing.
        plain = part.replace(b"\\\\", b"")
        self._escaped = self._escaped or plain.endswith(b"\\")
        pieces = plain.replace(b'\\"', b"").split(b'"')
        outside = b"".join(pieces[1 if self._in_string else 0 :: 2])
        self._in_string ^= len(pieces) % 2 == 0
        self._values += outside.count(b",")
        self._parts += outside.count(b"[") + outside.count(b"{") + outside.count(b":")
        if self._values > MAX_VALUES:
            raise Rejected(413, f"the body has more than {MAX_VALUES} values", "request_too_large")
        if self._parts > MAX_PARTS:
            words = f"the body has more than {MAX_PARTS} lists, objects and named entries"
            raise Rejected(413, words, "request_too_large")
