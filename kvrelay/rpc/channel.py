"""How every channel of KVRelay is opened: keepalive, message sizes, reconnects, no proxy. Knows no service."""

from __future__ import annotations

import re

import grpc

from kvrelay.errors import InvalidArgument

DEFAULT_MESSAGE_BYTES = 8 * 1024 * 1024 + 64 * 1024
"""Largest message a side takes unless told otherwise: 8 MiB of content and its headers. Unlimited is never right."""
KEEPALIVE_S = 20.0
KEEPALIVE_TIMEOUT_S = 10.0
"""Keepalive only finds connections that died without a word; who is alive is decided by heartbeats in a session."""
CONNECT_S = 5.0
"""How long one attempt to connect may take: a busy server answers late, and calls that wait for it must not fail."""
RECONNECT_FIRST_S = 0.1
RECONNECT_MOST_S = 2.0

Option = tuple[str, int | str]


def channel_options(max_receive_bytes: int = DEFAULT_MESSAGE_BYTES) -> list[Option]:
    """Options of a client's channel. gRPC ignores unknown names silently, so a test looks at their effect."""
    return [
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", round(KEEPALIVE_S * 1000)),
        ("grpc.keepalive_timeout_ms", round(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", round(RECONNECT_FIRST_S * 1000)),
        # Despite its name the time that an attempt has, not a pause between two.
        ("grpc.min_reconnect_backoff_ms", round(CONNECT_S * 1000)),
        ("grpc.max_reconnect_backoff_ms", round(RECONNECT_MOST_S * 1000)),
        ("grpc.enable_http_proxy", 0),
        ("grpc.service_config_disable_resolution", 1),
        # A connection of its own per channel: closing one never touches a stream of another.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def open_channel(target: str, *, max_receive_bytes: int = DEFAULT_MESSAGE_BYTES) -> grpc.aio.Channel:
    """An asyncio channel; the caller owns and closes it."""
    _require_port(target)
    return grpc.aio.insecure_channel(target, options=channel_options(max_receive_bytes))


def open_sync_channel(target: str, *, max_receive_bytes: int = DEFAULT_MESSAGE_BYTES) -> grpc.Channel:
    """A channel for threads; the caller owns and closes it."""
    _require_port(target)
    return grpc.insecure_channel(target, options=channel_options(max_receive_bytes))


def _require_port(target: str) -> None:
    """InvalidArgument for what is neither HOST:PORT nor has a scheme of gRPC's: it would take 443 for the port."""
    if not re.fullmatch(r".+:[0-9]+|[a-z0-9]+:.+", target):
        raise InvalidArgument(f"target must be HOST:PORT, not {target!r}", field="target")
