"""The client for threads: runs calls and streams on a grpc channel. Their meaning is in calls, request and fold."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc
from google.protobuf.message import Message

from kvrelay.client import calls
from kvrelay.client.calls import Operation
from kvrelay.client.fold import StreamFold
from kvrelay.client.options import GenerateOptions, Prompt
from kvrelay.client.request import GENERATE, generate_request
from kvrelay.client.values import Choice, GenerateResult, ModelInfo, TokenEvent, Topology
from kvrelay.config import DEFAULT_TARGET
from kvrelay.errors import Internal
from kvrelay.rpc.channel import open_sync_channel
from kvrelay.rpc.status import from_rpc_error
from kvrelay.v1 import inference_pb2

R = TypeVar("R", bound=Message)
T = TypeVar("T")


class Stream:
    """One generation. The call begins with the iteration and is cancelled when the iteration or `with` is left.

    Iterate once; `result` is there after the last token, `tokens` also when the stream failed.
    """

    def __init__(self, channel: grpc.Channel, request: inference_pb2.GenerateRequest, deadline_s: float | None) -> None:
        self._method = channel.unary_stream(
            GENERATE,
            request_serializer=inference_pb2.GenerateRequest.SerializeToString,
            response_deserializer=inference_pb2.GenerateResponse.FromString,
        )
        self._request = request
        self._deadline_s = deadline_s
        self._call: grpc.RpcContext | None = None
        self._fold = StreamFold(max(1, request.n))

    @property
    def request_id(self) -> str:
        return self._fold.request_id

    @property
    def prompt_text(self) -> str:
        """With echo: the prompt as the server has it, there from the first token on."""
        return self._fold.prompt_text

    @property
    def tokens(self) -> list[TokenEvent]:
        return self._fold.events

    @property
    def choices(self) -> list[Choice]:
        """The sequences that have ended so far, as they ended."""
        return self._fold.choices

    @property
    def result(self) -> GenerateResult:
        return self._fold.result

    def __iter__(self) -> Generator[TokenEvent, None, None]:
        if self._call is not None:
            raise Internal("a stream can be iterated once")
        began = time.monotonic()
        call = self._call = self._method(self._request, timeout=self._deadline_s)
        try:
            for message in call:
                event = self._fold.feed(message, time.monotonic() - began)
                if event is not None:
                    yield event
            _ = self.result
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Ends the call if it runs; may be called from another thread."""
        if self._call is not None:
            self._call.cancel()

    def collect(self) -> GenerateResult:
        """Reads to the end and returns the result."""
        for _ in self:
            pass
        return self.result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.cancel()


class Client:
    """Talks to one coordinator. timeout: seconds for every call but generate, which has deadline_s.

    `with` or `close` ends it. Usable from several threads.
    """

    def __init__(self, target: str = DEFAULT_TARGET, *, timeout: float = 10.0) -> None:
        self.target = target
        self._timeout = timeout
        self._channel = open_sync_channel(target)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Stream:
        """Streams tokens: `for token in client.generate(...)`. See GenerateOptions."""
        return Stream(self._channel, generate_request(prompt, options), options.get("deadline_s"))

    def tokenize(self, text: str, *, model: str = "") -> list[int]:
        return self._run(calls.tokenize(text, model))

    def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        return self._run(calls.detokenize(token_ids, model))

    def list_models(self) -> list[str]:
        return self._run(calls.list_models())

    def get_model(self, model: str = "") -> ModelInfo:
        return self._run(calls.get_model(model))

    def topology(self) -> Topology:
        return self._run(calls.topology())

    def drain_worker(self, worker_id: str, *, grace_s: float = 30.0) -> None:
        self._run(calls.drain_worker(worker_id, grace_s))

    def close(self) -> None:
        """Cancels what still runs and closes the channel."""
        self._channel.close()

    def _run(self, operation: Operation[R, T]) -> T:
        method = self._channel.unary_unary(
            operation.path, request_serializer=_serialize, response_deserializer=operation.parse
        )
        try:
            return operation.read(method(operation.request, timeout=self._timeout))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
