"""kvrelay.v1.InferenceService: protos in, protos out. Knows what a request may look like, not how it is served.

Generate: Accepted, one Token message per token, Finished for each sequence; errors only as the status. Whatever ends
the call, the dispatcher hears of it: from the handler's own end, and from the call's when a write was under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeAlias
from uuid import uuid4

import grpc
import structlog

from coordinator import validate
from coordinator.dispatch import Dispatcher
from coordinator.live import Live, Times
from coordinator.model_facts import ServedModel
from coordinator.output import output_texts
from coordinator.roster import Roster
from coordinator.states import RequestFacts
from coordinator.stream import ErrorItem, FinishItem, StreamBuffer, TokenItem
from coordinator.telling import Telling
from coordinator.text import KeysOf, Tokenizing
from coordinator.validate import Limits, RawRequest
from kvrelay.blocks import BlockKey, KeyScope, block_keys
from kvrelay.errors import DeadlineExceeded
from kvrelay.requests import FinishReason, RequestId
from kvrelay.rpc.status import to_grpc_status
from kvrelay.telemetry.tracing import traceparent_of
from kvrelay.v1 import common_pb2, inference_pb2, inference_pb2_grpc

log = structlog.get_logger("coordinator.service")

Context: TypeAlias = "grpc.aio.ServicerContext[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]"
REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
TENANT = "default"
"""Of every request, as nobody says who sends it."""
CUT_S = 0.5
"""How long the status of a reader that was cut off may take to leave."""


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(
        self, model: ServedModel, tokenizing: Tokenizing, dispatcher: Dispatcher, roster: Roster, telling: Telling
    ) -> None:
        self._model = model
        self._tokenizing = tokenizing
        self._dispatcher = dispatcher
        self._roster = roster
        self._telling = telling

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        times = Times(time.monotonic(), time.time_ns())
        remaining = context.time_remaining()
        deadline_at = None if remaining is None else times.accepted_at + remaining
        limits = self._model.limits(self._roster.context_limit)
        raw = raw_request(request)
        validate.check(raw, limits)
        self._dispatcher.check_room(raw.max_tokens != 1)
        prompt_ids, keys = await self._prompt(raw, limits)
        facts = self._facts(raw, prompt_ids, keys, limits, deadline_at)
        text, *more = output_texts(facts.n, self._model.codec.detokenizer, raw.stop, facts.stop.stop_token_ids)
        live = self._dispatcher.submit(facts, text, times, tuple(more))
        self._telling.started()
        gone = functools.partial(self._gone, live.id)
        context.add_done_callback(gone)  # type: ignore[arg-type]  # the stubs want a class, the library any callable
        try:
            async with aclosing(self._stream(live, context)) as messages:
                async for message in messages:
                    yield message
        finally:
            self._dispatcher.leave(live.id)
            self._telling.ended(live, limits.model_id, time.monotonic())

    def _gone(self, request_id: RequestId, _: Context) -> None:
        self._dispatcher.leave(request_id)

    async def _stream(self, live: Live, context: Context) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """The messages of one stream; raises its error. A reader that is cut off gets its status from here."""
        stream, task = live.stream, asyncio.current_task()
        message = accepted_message(live, self._model.identity.model_id)
        open_sequences, journal = live.facts.n, None
        try:
            while True:
                stream.writing(task)
                yield message
                written = stream.writing(None)
                if journal is not None:
                    journal.sent.append(written)
                    journal = None
                if not open_sequences:
                    return
                item = await stream.take()
                if type(item) is TokenItem:
                    message = token_message(item)
                    journal = live.children[item.sequence].journal if live.children else live.journal
                elif type(item) is FinishItem:
                    message = finished_message(item, live)
                    open_sequences -= 1
                elif type(item) is ErrorItem:
                    raise item.error
        except GeneratorExit:
            stream.writing(None)
            await _say_why_cut(stream, context)
            raise

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: object) -> inference_pb2.TokenizeResponse:
        validate.check_model(request.model, self._limits())
        return inference_pb2.TokenizeResponse(token_ids=await self._tokenizing.encode(request.text, True))

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: object
    ) -> inference_pb2.DetokenizeResponse:
        limits = self._limits()
        validate.check_model(request.model, limits)
        validate.check_token_ids("token_ids", request.token_ids, limits.vocab_size)
        return inference_pb2.DetokenizeResponse(text=await self._tokenizing.decode(request.token_ids))

    def _limits(self) -> Limits:
        return self._model.limits(self._roster.context_limit)

    async def _prompt(self, raw: RawRequest, limits: Limits) -> tuple[tuple[int, ...], tuple[BlockKey, ...]]:
        """Its tokens and the keys of their blocks. A template writes special tokens itself: none are added here."""
        keys_of = self._keys_of(raw)
        if raw.token_ids is not None:
            return raw.token_ids, await self._tokenizing.keys(raw.token_ids, keys_of) if keys_of is not None else ()
        codec, text = self._model.codec, raw.text
        if text is None:
            assert codec.template is not None, "checked by validate"
            text = codec.template.render(raw.chat or ())
        validate.check_length(raw, text, codec.longest_token, limits)
        return await self._tokenizing.prompt(text, raw.text is not None, keys_of)

    def _keys_of(self, raw: RawRequest) -> KeysOf | None:
        """By which the router finds the prompt in caches; None where it does not look, or the request wants none."""
        if raw.prefix_cache is False or not self._dispatcher.routes_by_keys:
            return None
        scope = KeyScope(TENANT, self._model.identity.fingerprint, cache_salt=raw.cache_salt)
        return functools.partial(block_keys, scope, block_size=self._roster.block_size)

    def _facts(
        self,
        raw: RawRequest,
        prompt_ids: tuple[int, ...],
        keys: tuple[BlockKey, ...],
        limits: Limits,
        deadline_at: float | None,
    ) -> RequestFacts:
        if deadline_at is not None and deadline_at <= time.monotonic():
            raise DeadlineExceeded("the deadline passed while the prompt was tokenized")
        return RequestFacts(
            request_id=RequestId(uuid4().hex),
            prompt_ids=prompt_ids,
            sampling=validate.sampling_of(raw, secrets.randbits(64), limits),
            stop=validate.fit(raw, len(prompt_ids), limits),
            tenant=TENANT,
            cache_salt=raw.cache_salt,
            deadline_at=deadline_at,
            traceparent=traceparent_of(),
            n=raw.n or 1,
            prefix_cache=raw.prefix_cache is not False,
            keys=keys,
        )


async def _say_why_cut(stream: StreamBuffer, context: Context) -> None:
    """The write of a slow reader was cancelled, and with it the call would stay without a status."""
    if stream.cut is not None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CUT_S):
                await context.abort_with_status(to_grpc_status(stream.cut))


def raw_request(request: inference_pb2.GenerateRequest) -> RawRequest:
    """What the client sent, in plain values; nothing is judged yet, but what cannot be a value at all."""
    sampling, prompt = request.sampling, request.WhichOneof("prompt")
    return RawRequest(
        model=request.model,
        text=request.text if prompt == "text" else None,
        token_ids=tuple(request.tokens.ids) if prompt == "tokens" else None,
        chat=tuple((m.role, m.content) for m in request.chat.messages) if prompt == "chat" else None,
        temperature=sampling.temperature if sampling.HasField("temperature") else None,
        top_p=sampling.top_p if sampling.HasField("top_p") else None,
        top_k=sampling.top_k if sampling.HasField("top_k") else None,
        seed=sampling.seed if sampling.HasField("seed") else None,
        max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
        stop=tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        n=request.n if request.HasField("n") else None,
        cache_salt=request.cache_salt,
        client_request_id=request.client_request_id,
        prefix_cache=request.prefix_cache if request.HasField("prefix_cache") else None,
    )


def accepted_message(live: Live, model_id: str) -> inference_pb2.GenerateResponse:
    facts = live.facts
    accepted = inference_pb2.Accepted(
        request_id=facts.request_id, prompt_tokens=len(facts.prompt_ids), seed=facts.sampling.seed, model=model_id
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
