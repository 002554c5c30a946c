"""Folds the messages of one stream into tokens and a result; the same for both clients. Knows no channel, no clock."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from kvrelay.client.values import Choice, GenerateResult, HandOff, TokenEvent, Usage
from kvrelay.errors import Internal
from kvrelay.rpc.sampling_convert import logprobs_from_proto
from kvrelay.v1 import common_pb2, inference_pb2

FINISH_REASONS: dict[int, str] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}


class StreamFold:
    """Takes messages in order, each with the time it came; checks that no token is lost, doubled or late.

    n: sequences asked for; the stream ends well when each of them has finished.
    """

    def __init__(self, n: int = 1) -> None:
        self._accepted = inference_pb2.Accepted()
        self._events: list[TokenEvent] = []
        self._n = n
        self._of: dict[int, list[TokenEvent]] = {}
        self._choices: list[Choice] = []
        self._ended: set[int] = set()
        self.on_choice: Callable[[Choice], None] = lambda _: None
        """Hears of each sequence when it has ended."""

    @property
    def request_id(self) -> str:
        """The server's id of the request; empty until it accepted."""
        return self._accepted.request_id

    @property
    def prompt_text(self) -> str:
        """The prompt as the server has it; empty until it accepted, and without echo."""
        return self._accepted.prompt_text

    @property
    def events(self) -> list[TokenEvent]:
        """The tokens so far, of all sequences as they came; theirs also when the stream then fails."""
        return self._events

    @property
    def choices(self) -> list[Choice]:
        """The sequences that have ended so far, as they ended."""
        return self._choices

    @property
    def result(self) -> GenerateResult:
        """Internal if the stream has not ended well: it was left, it failed, or it is still running."""
        if len(self._choices) < self._n:
            raise Internal(f"the stream has no result: {len(self._events)} tokens came, but no finish")
        ordered = sorted(self._choices, key=lambda choice: choice.sequence)
        about = self._accepted
        return GenerateResult.of(about.request_id, about.seed, about.model, ordered, about.prompt_text)

    def feed(self, message: inference_pb2.GenerateResponse, received_s: float) -> TokenEvent | None:
        """The token in a message, None if it holds none. Internal if the server broke its promise."""
        if len(self._choices) == self._n:
            raise Internal("a message came after the finish")
        match message.WhichOneof("event"):
            case "accepted":
                self._accepted = message.accepted
            case "token":
                return self._token(message.token, received_s)
            case "finished":
                self._finish(message.finished)
            case None:
                pass  # an event of a newer server, which old clients may skip
        return None

    def _token(self, token: inference_pb2.Token, received_s: float) -> TokenEvent:
        sequence = token.sequence
        events = self._running(sequence)
        due = len(events)
        if token.index != due:
            raise Internal(f"token {token.index} came where token {due} was due")
        logprobs = logprobs_from_proto(token.logprobs) if token.HasField("logprobs") else None
        event = TokenEvent(token.index, token.token_id, token.text, token.offset_s, received_s, sequence, logprobs)
        events.append(event)
        self._events.append(event)
        return event

    def _running(self, sequence: int) -> list[TokenEvent]:
        if sequence >= self._n or sequence in self._ended:
            raise Internal(f"something came for sequence {sequence}, which is none of {self._n} that run")
        return self._of.setdefault(sequence, [])

    def _finish(self, finished: inference_pb2.Finished) -> None:
        if finished.reason not in FINISH_REASONS:
            raise Internal(f"the stream finished for an unknown reason: {finished.reason}")
        usage, events = finished.usage, self._running(finished.sequence)
        times = [event.received_s * 1000 for event in events]
        choice = Choice(
            sequence=finished.sequence,
            token_ids=tuple(event.token_id for event in events),
            text="".join(event.text for event in events) + finished.text,
            tail=finished.text,
            finish_reason=FINISH_REASONS[finished.reason],
            usage=Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
            ttft_ms=times[0] if times else None,
            gaps_ms=tuple(later - earlier for earlier, later in pairwise(times)),
            prefill_worker=finished.prefill_worker,
            decode_worker=finished.decode_worker,
            hand_off=_hand_off(finished),
            migrations=finished.migrations,
            logprobs=tuple(event.logprobs for event in events if event.logprobs is not None),
        )
        self._ended.add(choice.sequence)
        self._choices.append(choice)
        self.on_choice(choice)


def _hand_off(finished: inference_pb2.Finished) -> HandOff | None:
    if not finished.HasField("hand_off"):
        return None
    cost = finished.hand_off
    return HandOff(
        cost.transport, cost.num_blocks, cost.num_bytes, cost.seconds, cost.exposed_s, cost.num_cached_blocks
    )
