"""The edge of our services: parses requests, turns errors into rich statuses, counts running calls.

Knows no service. Handlers become coroutines that write, so that a call cut off while it writes still closes its
handler's generator at once, and not when the garbage collector finds it. CancelledError always passes through.
A method may have a door: whom it keeps out is told so before the request is parsed or traced, as cheaply as can be.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError

from kvrelay.errors import InvalidArgument, ResourceExhausted, Unavailable, Unimplemented
from kvrelay.rpc.status import as_error, to_grpc_status, with_ids
from kvrelay.telemetry.calls import LABEL_HEADER, CallIds, begin

OUR_METHODS = "/kvrelay."
"""Paths of our services begin so; health and reflection stay as their library made them."""

# grpc.aio hands handlers and messages of any service through one interface, so their types are open here.
# They are generic in the stubs alone, hence the quotes.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Body: TypeAlias = "Callable[[Any, Context], Awaitable[Any]]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"
Door: TypeAlias = Callable[[], ResourceExhausted | None]
"""Asked when a call comes in: why it cannot be taken now, or None. Must not wait or raise."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Malformed:
    """Stands for a message that could not be parsed, until its handler's edge refuses it."""

    reason: str


def body_of(handler: Handler) -> Body:
    """What a handler does, as one coroutine function: messages of an async generator are written as they come."""
    method = getattr(handler, _kind_of(handler))

    async def run(request: Any, context: Context) -> Any:
        out = method(request, context)
        if inspect.isawaitable(out):
            return await out
        async with aclosing(cast(AsyncGenerator[Any, None], out)) as messages:
            async for message in messages:
                await context.write(message)
        return None

    return run


def with_body(handler: Handler, body: Body, *, lenient: bool = False) -> Handler:
    """The same method with another body. lenient: what cannot be parsed reaches the body as Malformed."""
    parse = handler.request_deserializer
    make = getattr(grpc, f"{_kind_of(handler)}_rpc_method_handler")
    deserializer = _lenient(parse) if lenient and parse is not None else parse
    return cast(Handler, make(body, deserializer, handler.response_serializer))


def _kind_of(handler: Handler) -> str:
    sides = (handler.request_streaming, handler.response_streaming)
    return "_".join("stream" if streaming else "unary" for streaming in sides)


def _lenient(parse: Callable[[bytes], T]) -> Callable[[bytes], T | Malformed]:
    def deserialize(raw: bytes) -> T | Malformed:
        try:
            return parse(raw)
        except DecodeError as error:
            return Malformed(str(error))

    return deserialize


def _parsed(message: T | Malformed) -> T:
    if isinstance(message, Malformed):
        raise InvalidArgument(f"the request is not a valid message: {message.reason}", field="request")
    return message


async def _each_parsed(messages: AsyncIterator[T | Malformed]) -> AsyncIterator[T]:
    async for message in messages:
        yield _parsed(message)


class _ReadingContext:
    """A call's context whose `read` refuses what is not a valid message; all else is the context's own."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> Any:
        return _parsed(await self._context.read())


class EdgeInterceptor(grpc.aio.ServerInterceptor):
    """Outermost interceptor of every server of ours. One per server, used on one event loop."""

    def __init__(self) -> None:
        self.running = 0
        """Calls of our services that have not ended."""
        self.draining = False
        """From now on new calls are refused with UNAVAILABLE."""
        self.doors: dict[str, Door] = {}
        """By path of the method, which answers one request with a stream."""
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_idle(self) -> None:
        """Returns once no call runs."""
        await self._idle.wait()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        method = handler_call_details.method
        door = self.doors.get(method)
        if door is not None and not self.draining and (refusal := door()) is not None:
            return _refusing(refusal, begin(_label_of(handler_call_details)))
        handler = await continuation(handler_call_details)
        if handler is None:
            return _unknown(method, begin(_label_of(handler_call_details)))
        if not method.startswith(OUR_METHODS):
            return handler
        return with_body(handler, self._guarded(handler, _label_of(handler_call_details)), lenient=True)

    def _guarded(self, handler: Handler, label: str) -> Body:
        body = _reading(body_of(handler)) if handler.request_streaming else body_of(handler)
        streaming, answers = handler.request_streaming, not handler.response_streaming

        async def run(request: Any, context: Context) -> Any:
            self.running += 1
            self._idle.clear()
            ids = begin(label)
            try:
                self._admit()
                ids.check()
                answer = await body(request if streaming else _parsed(request), context)
                if answers:  # a stream says its ids itself, with or before its first message
                    await context.send_initial_metadata(ids.metadata)
                return answer
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                await context.abort_with_status(to_grpc_status(as_error(error, ids.words), ids.metadata))
            finally:
                self.running -= 1
                if not self.running:
                    self._idle.set()

        return run

    def _admit(self) -> None:
        if self.draining:
            raise Unavailable("the server is shutting down", retry_after_s=1.0)


def _label_of(details: grpc.HandlerCallDetails) -> str:
    """The caller's label of a call; of several the first."""
    for key, value in details.invocation_metadata or ():
        if key == LABEL_HEADER and isinstance(value, str):
            return value
    return ""


def _reading(body: Body) -> Body:
    """The body of a method that reads a stream of requests."""

    async def run(requests: Any, context: Context) -> Any:
        reading = cast(Context, _ReadingContext(context))
        async with aclosing(cast(AsyncGenerator[Any, None], _each_parsed(requests))) as messages:
            return await body(messages, reading)

    return run


def _refusing(refusal: ResourceExhausted, ids: CallIds) -> Handler:
    """Takes the request as the bytes it is, and answers with the error."""

    async def run(request: bytes, context: Context) -> None:
        metadata = tuple(refusal.metadata.items())
        await context.abort_with_status(
            with_ids(_status_of(refusal.message, refusal.retry_after_s, metadata), ids.metadata)
        )

    return grpc.unary_stream_rpc_method_handler(run)


def _unknown(method: str, ids: CallIds) -> Handler:
    """Refuses a call of what is not here, whatever it sends; the library would, but without details."""

    async def run(requests: AsyncIterator[bytes], context: Context) -> None:
        await context.abort_with_status(
            to_grpc_status(Unimplemented(f"there is no method {method} here"), ids.metadata)
        )

    return grpc.stream_stream_rpc_method_handler(run)


@lru_cache(maxsize=32)
def _status_of(message: str, retry_after_s: float | None, metadata: tuple[tuple[str, str], ...]) -> grpc.Status:
    """Hundreds a second may be refused in the same words."""
    return to_grpc_status(ResourceExhausted(message, retry_after_s=retry_after_s, metadata=dict(metadata)))
