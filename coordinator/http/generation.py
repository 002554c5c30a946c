"""What a body asks for, opened, read and answered: in one piece or as events. The same for completions and chat."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry.trace import Span

from coordinator.http.calls import Call, CutOff
from coordinator.http.logprobs import ChatLogprobs, CompletionLogprobs, LogprobsOf
from coordinator.http.parsing import wrong
from coordinator.http.shapes import CHAT, DONE, Answer, Chunks, Shape, Usage, Whole, usage_event, whole_answer
from coordinator.http.tracing import inside
from coordinator.live import Live, Times
from coordinator.raw import RawRequest
from coordinator.serving import Reading, Serving
from coordinator.stream import ErrorItem, FinishItem, TokenItem


@dataclass(frozen=True, slots=True)
class Asked:
    """requests: one for each prompt; their choices come in this order. names: see errors.param_of.

    in_list: the prompts were written as a list of prompts. says_usage: the stream ends with it. counts: each chunk says
    what is used so far.
    """

    shape: Shape
    requests: Sequence[RawRequest]
    names: Mapping[str, str]
    streams: bool = False
    says_usage: bool = False
    counts: bool = False
    in_list: bool = False

    def names_at(self, position: int) -> Mapping[str, str]:
        """What the body calls the fields of one of the requests."""
        if not self.in_list:
            return self.names
        prompt = f"prompt[{position}]"
        return {**self.names, "text": prompt, "tokens.ids": prompt}


@dataclass(slots=True)
class Opened:
    """One request that is in. first: index of its first choice."""

    raw: RawRequest
    live: Live
    span: Span
    first: int
    usage: Usage


async def generate(call: Call, asked: Asked) -> None:
    """Takes all requests in, or none; each is closed whatever happens."""
    serving = call.door.serving
    opened: list[Opened] = []
    try:
        async with call.in_time():
            await _open(call, asked, opened)
        live = opened[0].live
        model = serving.model.identity.model_id
        answer = Answer(asked.shape, live.id, call.accepted_ns // 10**9, model)
        if asked.streams:
            await _stream(call, asked, answer, opened)
        else:
            wholes = await _gathered(serving, asked, opened)
    finally:
        await _close(serving, opened)
    if not asked.streams:
        await call.answer_pieces(whole_answer(answer, wholes, _total(opened)))


async def _open(call: Call, asked: Asked, opened: list[Opened]) -> None:
    """Room for all of them is there before the first comes in, and other calls get their turns between them."""
    serving, first, requests = call.door.serving, 0, asked.requests
    if len(requests) > max(1, serving.most_at_once):
        raise wrong("prompt", f"at most {serving.most_at_once} prompts at once here, not {len(requests)}")
    with serving.room(len(requests)) as room:
        for raw in requests:
            if opened:
                await asyncio.sleep(0)
            call.names = asked.names_at(len(opened))
            span = call.another_span() if opened else call.spans[0]
            with inside(span):
                times = Times(call.accepted_at, call.accepted_ns)
                request_id = "" if opened else call.ids.request_id
                live = await serving.open(raw, times, call.deadline_at, request_id, room)
            usage = Usage(prompt_tokens=len(live.facts.prompt_ids))
            opened.append(Opened(raw, live, span, first, usage))
            first += live.facts.n
    call.names = asked.names


async def _close(serving: Serving, opened: Sequence[Opened]) -> None:
    """Other calls get their turns between them; a cancel in such a turn has the rest closed at once."""
    left = deque(opened)
    try:
        while left:
            _close_one(serving, left.popleft())
            if left:
                await asyncio.sleep(0)
    finally:
        for one in left:
            _close_one(serving, one)


def _close_one(serving: Serving, one: Opened) -> None:
    with inside(one.span):
        serving.close(one.live)


async def _stream(call: Call, asked: Asked, answer: Answer, opened: Sequence[Opened]) -> None:
    await _all([_events(call, one, _chunks(call.door.serving, asked, answer, one)) for one in opened])
    await call.last_event((usage_event(answer, _total(opened)) if asked.says_usage else b"") + DONE)


def _chunks(serving: Serving, asked: Asked, answer: Answer, one: Opened) -> Chunks:
    logprobs = _logprobs(serving, asked.shape, one.raw)
    n, says, counts = one.live.facts.n, asked.says_usage, asked.counts
    return Chunks(answer, one.first, n, one.usage, says_usage=says, counts=counts, logprobs=logprobs)


async def _events(call: Call, one: Opened, chunks: Chunks) -> None:
    """Writes each item before it takes the next. The first of them brings the answer's head: until then an error has a
    status of its own.
    """
    live, still_open = one.live, one.live.facts.n
    reading, opening = Reading(live), chunks.opening(live.prompt_text)
    try:
        while still_open:
            item = await reading.take()
            if type(item) is TokenItem:
                data = chunks.token(item)
            elif type(item) is FinishItem:
                one.usage.finished(item)
                still_open -= 1
                data = chunks.finish(item)
            elif type(item) is ErrorItem:
                raise item.error
            if opening:
                data, opening = opening + data, b""
            reading.writing(item)
            await call.event(data)
            reading.written()
    except asyncio.CancelledError:
        reading.gone()
        if live.stream.cut is None:
            raise
        raise CutOff from live.stream.cut


async def _gathered(serving: Serving, asked: Asked, opened: Sequence[Opened]) -> list[Whole]:
    """All choices, in their order."""
    wholes = []
    for one in opened:
        logprobs = _logprobs(serving, asked.shape, one.raw)
        wholes.append(Whole(asked.shape, one.first, one.live.facts.n, one.live.prompt_text, logprobs))
    await _all([_gather(one, whole) for one, whole in zip(opened, wholes, strict=True)])
    return wholes


async def _gather(one: Opened, whole: Whole) -> None:
    """A token counts as written when it is taken: nothing waits for the client before the end."""
    reading, still_open = Reading(one.live), one.live.facts.n
    while still_open:
        item = await reading.take()
        reading.writing(item)
        if type(item) is TokenItem:
            whole.token(item)
        elif type(item) is FinishItem:
            whole.finish(item)
            one.usage.finished(item)
            still_open -= 1
        elif type(item) is ErrorItem:
            raise item.error
        reading.written()


async def _all(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """All of them at once; the first error ends the others and is raised."""
    if len(works) == 1:
        await works[0]
        return
    try:
        async with asyncio.TaskGroup() as tasks:
            for work in works:
                tasks.create_task(work)
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


def _logprobs(serving: Serving, shape: Shape, raw: RawRequest) -> LogprobsOf | None:
    codec = serving.model.codec
    if raw.logprobs is None:
        return None
    return ChatLogprobs(codec) if shape is CHAT else CompletionLogprobs(codec, raw.skip_special_tokens)


def _total(opened: Sequence[Opened]) -> Usage:
    total = Usage()
    for one in opened:
        total.add(one.usage)
    return total
