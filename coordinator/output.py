"""One stream's text: tokens in, certain text out, stop strings watched. Knows no requests and no streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.detokenize import Detokenizer
from coordinator.stops import StopAutomaton, StopStrings


class OutputText:
    """Tokens that end the sequence (EOS, stop ids) have no text, nor has the stop string, unless include_stop.

    Stop strings are looked for in the text of what follows the first min_tokens tokens. Among these a token that ends
    the sequence is rare (a grammar allowed nothing else), and no other than later. Raises IndexError for ids outside
    the vocabulary.
    """

    __slots__ = ("_detokenizer", "_free", "_hit", "_silent_ids", "_stops")

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopAutomaton | None,
        silent_ids: frozenset[int],
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, include_stop) if stops is not None else None
        self._silent_ids = frozenset() if include_stop else silent_ids
        self._free = min_tokens
        self._hit = False

    def push(self, token_id: int) -> tuple[str, bool]:
        """(text that became certain, whether a stop string is complete). After a hit only `finish` may follow."""
        free = self._free > 0
        if free:
            self._free -= 1
        if token_id in self._silent_ids:
            return "", False
        text = self._detokenizer.push(token_id)
        if free or self._stops is None or not text:
            return text, False
        text, self._hit = self._stops.feed(text)
        return text, self._hit

    def finish(self) -> str:
        """What was held back; nothing after a stop string. Bytes left over may complete a stop string: cut there."""
        if self._hit:
            return ""
        rest = self._detokenizer.flush()
        if self._stops is None:
            return rest
        text, hit = self._stops.feed(rest)
        return text if hit else text + self._stops.flush()


def output_texts(
    n: int,
    detokenizer: Callable[[], Detokenizer],
    stops: Sequence[str],
    silent_ids: frozenset[int],
    include_stop: bool = False,
    min_tokens: int = 0,
) -> list[OutputText]:
    """Of the n sequences of one request. Stop strings are compiled once: 16 long ones take several ms."""
    automaton = StopAutomaton(stops) if stops else None
    return [OutputText(detokenizer(), automaton, silent_ids, include_stop, min_tokens) for _ in range(n)]
