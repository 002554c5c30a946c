"""kvrelay.v1.InferenceService: protos in, protos out. Knows what a request may look like, not how it is served.

Generate: Accepted, one Token message per token, Finished for each sequence; errors only as the status. Whatever ends
the call, the dispatcher hears of it: from the handler's own end, and from the call's when a write was under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from typing import TypeAlias

import grpc

from coordinator.live import Live, Times
from coordinator.request_wire import raw_request
from coordinator.serving import Reading, Serving
from coordinator.stream import ErrorItem, FinishItem, StreamBuffer, TokenItem
from coordinator.text import IDS_AT_ONCE
from kvrelay.requests import FinishReason
from kvrelay.rpc.sampling_convert import add_logprobs
from kvrelay.rpc.status import to_grpc_status
from kvrelay.telemetry import calls
from kvrelay.v1 import common_pb2, inference_pb2, inference_pb2_grpc

Context: TypeAlias = "grpc.aio.ServicerContext[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]"
REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
CUT_S = 0.5
"""How long the status of a reader that was cut off may take to leave."""


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def Generate(  # type: ignore[override]  # a coroutine that writes costs less than a generator
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        times = Times(time.monotonic(), time.time_ns())
        remaining = context.time_remaining()
        deadline_at = None if remaining is None else times.accepted_at + remaining
        serving = self._serving
        ids = calls.current() or calls.begin()
        live = await serving.open(raw_request(request, serving.limits), times, deadline_at, ids.request_id)
        gone = functools.partial(self._gone, live)
        context.add_done_callback(gone)  # type: ignore[arg-type]  # the stubs want a class, the library any callable
        try:
            await context.send_initial_metadata(ids.metadata)
            await self._stream(live, context)
        finally:
            serving.close(live)

    def _gone(self, live: Live, _: Context) -> None:
        self._serving.leave(live)

    async def _stream(self, live: Live, context: Context) -> None:
        """Writes the messages of one stream; raises its error. A reader that is cut off gets its status from here."""
        reading, write = Reading(live), context.write
        message = accepted_message(live, self._serving.model.identity.model_id)
        open_sequences, item = live.facts.n, None
        while True:
            reading.writing(item)
            try:
                await write(message)
            except asyncio.CancelledError:
                reading.gone()
                await _say_why_cut(live.stream, context)
                raise
            reading.written()
            if not open_sequences:
                return
            item = await reading.take()
            if type(item) is TokenItem:
                message = token_message(item)
            elif type(item) is FinishItem:
                message = finished_message(item, live)
                open_sequences -= 1
            elif type(item) is ErrorItem:
                raise item.error

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: object) -> inference_pb2.TokenizeResponse:
        token_ids = await self._serving.tokenize(request.model, request.text)
        return await self._serving.tokenizing.aside(len(token_ids), tokenize_response, token_ids)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: object
    ) -> inference_pb2.DetokenizeResponse:
        text = await self._serving.detokenize(request.model, request.token_ids)
        return inference_pb2.DetokenizeResponse(text=text)


def tokenize_response(token_ids: list[int]) -> inference_pb2.TokenizeResponse:
    """In pieces: other threads run between them."""
    response = inference_pb2.TokenizeResponse()
    for start in range(0, len(token_ids), IDS_AT_ONCE):
        response.token_ids.extend(token_ids[start : start + IDS_AT_ONCE])
    return response


async def _say_why_cut(stream: StreamBuffer, context: Context) -> None:
    """The write of a slow reader was cancelled, and with it the call would stay without a status."""
    if stream.cut is not None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CUT_S):
                ids = calls.current()
                await context.abort_with_status(to_grpc_status(stream.cut, ids.metadata if ids else ()))


def accepted_message(live: Live, model_id: str) -> inference_pb2.GenerateResponse:
    facts = live.facts
    accepted = inference_pb2.Accepted(
        request_id=facts.request_id,
        prompt_tokens=len(facts.prompt_ids),
        seed=facts.sampling.seed,
        model=model_id,
        prompt_text=live.prompt_text,
    )
    return inference_pb2.GenerateResponse(accepted=accepted)


def token_message(item: TokenItem) -> inference_pb2.GenerateResponse:
    """Filled in place: once per token."""
    message = inference_pb2.GenerateResponse()
    token = message.token
    if item.sequence:
        token.sequence = item.sequence
    token.index = item.index
    token.token_id = item.token_id
    token.text = item.text
    token.offset_s = item.offset_s
    if item.logprobs is not None:
        add_logprobs(token.logprobs, item.logprobs)
    return message


def finished_message(item: FinishItem, live: Live) -> inference_pb2.GenerateResponse:
    finished = inference_pb2.Finished(
        sequence=item.sequence,
        reason=REASONS[item.reason],
        text=item.text,
        usage=inference_pb2.Usage(
            prompt_tokens=len(live.facts.prompt_ids),
            completion_tokens=item.completion_tokens,
            cached_tokens=item.cached_tokens,
        ),
        offset_s=item.offset_s,
        prefill_worker=item.prefill_worker,
        decode_worker=item.decode_worker,
        migrations=item.migrations,
    )
    pushed = item.pushed
    if pushed is not None:
        finished.hand_off.transport = pushed.transport
        finished.hand_off.num_blocks = pushed.num_blocks
        finished.hand_off.num_bytes = pushed.num_bytes
        finished.hand_off.seconds = pushed.seconds
        finished.hand_off.exposed_s = pushed.exposed_s
        finished.hand_off.num_cached_blocks = item.num_cached_blocks
    return inference_pb2.GenerateResponse(finished=finished)
