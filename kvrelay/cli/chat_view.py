"""What a conversation shows: answers on stdout as they come, or as JSON; all else on stderr. Knows no conversation."""

from __future__ import annotations

import json
import os
import sys

from kvrelay.cli.ask import result_object
from kvrelay.cli.problems import report
from kvrelay.client.values import GenerateResult, HandOff
from kvrelay.errors import KVRelayError

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class View:
    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._dims = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        self._in_line = False

    def text(self, piece: str) -> None:
        """A piece of the answer that is coming."""
        if piece and not self._as_json:
            self._in_line = True
            print(piece, end="", flush=True)

    def answered(self, turn: int, num_left_out: int, result: GenerateResult) -> None:
        """The answer is complete, and its text is shown but for the tail."""
        self.text(result.tail)
        self._end()
        self.note(timing_line(result))
        self._object({"turn": turn, "left_out": num_left_out} | result_object(result))

    def cancelled(self, turn: int, num_left_out: int, text: str) -> None:
        self._end()
        self.note("cancelled; what came of it stays in the conversation" if text else "cancelled before it began")
        self._object({"turn": turn, "left_out": num_left_out, "cancelled": True, "text": text})

    def failed(self, error: KVRelayError) -> None:
        self._end()
        report(error, self._as_json)

    def note(self, text: str) -> None:
        """Something to know for people; programs have it in the objects."""
        if not self._as_json:
            print(f"{DIM}{text}{PLAIN}" if self._dims else text, file=sys.stderr, flush=True)

    def _object(self, value: dict[str, object]) -> None:
        if self._as_json:
            print(json.dumps(value, ensure_ascii=False), flush=True)

    def _end(self) -> None:
        if self._in_line:
            self._in_line = False
            print(flush=True)


def timing_line(result: GenerateResult) -> str:
    """How an answer came about, in one line."""
    usage, gaps = result.usage, result.gaps_ms
    parts = [f"{usage.completion_tokens} token{'s' if usage.completion_tokens != 1 else ''}"]
    if result.finish_reason == "length":
        parts[0] += " (--max-tokens)"
    if result.ttft_ms is not None:
        parts.append(
            f"first {_ms(result.ttft_ms)} ({usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached)"
        )
    if gaps:
        parts.append(f"{_ms(sum(gaps) / len(gaps))} a token, slowest {_ms(max(gaps))}")
    parts.append(" -> ".join(dict.fromkeys((result.prefill_worker, result.decode_worker))))
    if result.hand_off is not None:
        parts.append(_moved(result.hand_off))
    if result.migrations:
        parts.append(f"moved {result.migrations} time{'s' if result.migrations != 1 else ''} as workers were lost")
    return " · ".join(part for part in parts if part)


def _moved(cost: HandOff) -> str:
    blocks = f"hand-off {cost.num_blocks} block{'s' if cost.num_blocks != 1 else ''}"
    return f"{blocks} {cost.num_bytes / 1e6:.1f} MB {_ms(cost.seconds * 1e3)}"


def _ms(value: float) -> str:
    return f"{value:.1f} ms" if value < 20 else f"{value:.0f} ms"
