"""Answers of unknown length for HTTP/1.0, which has no chunks: they end with their connection."""

from __future__ import annotations

import sys

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def unframed(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """The app for one such request. uvicorn closes the connection after it, but writes chunks all the same."""
    is_open_ended = False

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def plain(message: Message) -> None:
            nonlocal is_open_ended
            if message["type"] == "http.response.start":
                is_open_ended = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                if is_open_ended:
                    cycle.chunked_encoding = False
            elif is_open_ended:
                # The length is checked by uvicorn; several writers may be at it until the last part.
                more = message.get("more_body", False)
                cycle.expected_content_length = sys.maxsize if more else len(message.get("body", b""))
            await send(message)

        await app(scope, receive, plain)

    return wrapped
