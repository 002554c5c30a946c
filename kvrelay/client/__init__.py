"""Clients of KVRelay: `AsyncClient` for asyncio, `Client` for everything else. Needs the base install only.

    from kvrelay.client import Client

    with Client("127.0.0.1:50061") as client, client.generate("Once upon a time", max_tokens=32) as stream:
        for token in stream:
            print(token.text, end="", flush=True)
        print(stream.result.tail)

Errors are the classes of kvrelay.errors. Leaving an iteration, or a `with` block, cancels the call.
"""

from kvrelay.client.async_client import AsyncClient, AsyncStream
from kvrelay.client.options import ChatMessage, GenerateOptions, Prompt
from kvrelay.client.sync_client import Client, Stream
from kvrelay.client.values import Choice, GenerateResult, HandOff, ModelInfo, TokenEvent, Topology, Usage, WorkerStatus
from kvrelay.requests import Logprobs

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "ChatMessage",
    "Choice",
    "Client",
    "GenerateOptions",
    "GenerateResult",
    "HandOff",
    "Logprobs",
    "ModelInfo",
    "Prompt",
    "Stream",
    "TokenEvent",
    "Topology",
    "Usage",
    "WorkerStatus",
]
