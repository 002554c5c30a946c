"""What a peer may send over a link, and what it cannot do to this process with it: its link ends, by name."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from support.greetings import HELLO, LAYOUT, WELCOME, D, P

from kvrelay.errors import InvalidArgument, Unavailable
from kvrelay.link import (
    AbortedNotice,
    LandedNotice,
    LinkWelcome,
    PartManifest,
    Renew,
    ToDecode,
    ToPrefill,
)
from kvrelay.requests import Incarnation, WorkerId
from kvrelay.rpc.convert import to_decode_from_proto, to_prefill_from_proto, to_prefill_to_proto
from kvrelay.rpc.link_convert import MAX_REASON
from kvrelay.v1 import link_pb2
from worker.events import Event, FromDecode, FromPrefill, LinkClosed, LinkOpened, OpenLink
from worker.link_client import LinkClient
from worker.link_room import LEAST_BYTES
from worker.link_server import LinkServer
from worker.mailbox import Mailbox
from worker.wire import dial_link

MIB = 1024 * 1024


def wire(message: ToPrefill) -> bytes:
    return to_prefill_to_proto(message).SerializeToString()


def changed(**fields: Any) -> bytes:
    return wire(replace(WELCOME, **fields))


def of(**kinds: Any) -> bytes:
    return link_pb2.LinkResponse(**kinds).SerializeToString()


@asynccontextmanager
async def fake_decode(answers: list[bytes], compress: bool = False) -> AsyncIterator[str]:
    """Its address. It says these bytes, whatever it hears, and then nothing more."""

    async def link(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        for answer in answers:
            yield answer
        async for _ in requests:
            pass

    handler = grpc.stream_stream_rpc_method_handler(link)
    compression = grpc.Compression.Gzip if compress else None
    server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)], compression=compression)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("kvrelay.v1.LinkService", {"Link": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  # what is looked at sets no event
            await asyncio.sleep(0.005)


async def add_peer(welcome: LinkWelcome) -> None:
    """Takes any."""


HOSTILE: dict[str, tuple[list[bytes], str]] = {
    "no message of ours": ([b"\xff\xff\xff\xff"], "the decode worker sent what is no message of this protocol"),
    "nothing in it": ([wire(WELCOME), b""], "link.kind is missing, or a message newer than this version"),
    "no welcome first": ([wire(LandedNotice(1))], "a decode worker's first message must be a welcome"),
    "two welcomes": ([wire(WELCOME)] * 2, "welcome was already said"),
    "another life": ([changed(incarnation=Incarnation("x"))], "incarnation differs: dd wanted, x there"),
    "another layout": ([changed(layout=replace(LAYOUT, head_dim=4))], "the welcome's layout is not the one agreed on"),
    "another transport": ([changed(transport="nixl")], "the welcome's transport is not the one agreed on"),
    "no lease": ([changed(lease_s=math.nan)], "link.welcome.lease_s must be a finite number above 0, not nan"),
    "a lease that has ended": (
        [wire(WELCOME), of(opened=link_pb2.Opened(epoch=1, lease_s=-1.0))],
        "link.opened.lease_s must be a finite number above 0, not -1.0",
    ),
    "a lease without end": (
        [wire(WELCOME), of(renewed=link_pb2.Renewed(epoch=1, lease_s=math.inf))],
        "link.renewed.lease_s must be a finite number above 0, not inf",
    ),
    "a name without end": ([changed(worker_id=WorkerId("d" * MIB))], "link.welcome.worker_id must have at most 512"),
    "a message over the limit": ([wire(WELCOME), bytes(9 * MIB)], "larger than max"),
}


@pytest.mark.parametrize("kind", [*HOSTILE, "a small message that is 64 MiB when unpacked"])
async def test_what_a_decode_worker_may_not_say_ends_its_link_by_name_and_nothing_else(kind: str) -> None:
    answers, why = HOSTILE.get(kind, ([wire(WELCOME), bytes(64 * MIB)], "larger than max"))
    mailbox, got = Mailbox[Event](), list[Event]()
    client = LinkClient(mailbox, HELLO, dial_link, add_peer)
    async with fake_decode(answers, compress=kind not in HOSTILE) as address:
        client.ensure(OpenLink(D, WorkerId("d"), address))
        await until(lambda: got.extend(mailbox.take(0)) or any(isinstance(e, LinkClosed) for e in got))
    closed = got[-1]
    assert isinstance(closed, LinkClosed)
    assert why in closed.reason
    assert closed.peer_dead == (kind == "another life")
    assert [type(e) for e in got[:-1]] == [LinkOpened] * (len(got) - 1)
    await client.close()


async def test_a_write_to_a_link_that_is_over_fails_as_one_that_breaks_does() -> None:
    """And not as a bug of ours."""
    async with AsyncExitStack() as server:
        address = await server.enter_async_context(fake_decode([wire(WELCOME)]))
        async with dial_link(address) as call:
            await call.write(HELLO)
            assert isinstance(await anext(call.messages()), LinkWelcome)
            await server.aclose()
            await until(call._call.done)
            with pytest.raises(Unavailable, match="the call is over"):
                await call.write(Renew(1))


async def test_a_flood_of_messages_waits_for_the_engine_and_leaves_room_for_others() -> None:
    """Many thousands during one step would fill the mailbox, and what others post then ends them, or the process."""
    mailbox, got = Mailbox[Event](limit=64, bulk_limit_bytes=8 * LEAST_BYTES), list[Event]()
    client = LinkClient(mailbox, HELLO, dial_link, add_peer)
    flood = [wire(AbortedNotice(i, "y" * 4 * MIB)) for i in range(4)] + [wire(LandedNotice(i)) for i in range(500)]
    async with fake_decode([wire(WELCOME), *flood]) as address:
        client.ensure(OpenLink(D, WorkerId("d"), address))
        await until(lambda: not mailbox.has_room())
        await asyncio.sleep(0.1)  # whatever would come now does not
        for i in range(64 - 9):
            mailbox.post(LinkOpened(Incarnation(str(i))))
        await until(lambda: got.extend(mailbox.take(0)) or FromDecode(D, LandedNotice(499)) in got)
        heard = [e.message for e in got if isinstance(e, FromDecode)]
        assert heard == [AbortedNotice(i, "y" * MAX_REASON) for i in range(4)] + [LandedNotice(i) for i in range(500)]
        assert not any(isinstance(e, LinkClosed) for e in got)
        await client.close()


async def test_a_flood_of_a_prefill_worker_waits_as_well_and_its_manifests_count_with_their_size() -> None:
    mailbox = Mailbox[Event](limit=64, bulk_limit_bytes=8 * LEAST_BYTES)
    server, sent = LinkServer(mailbox, WELCOME, "fp"), list[ToDecode]()
    flood = [PartManifest(bytes(5 * LEAST_BYTES))] * 4 + [Renew(i) for i in range(200)]

    async def messages() -> AsyncIterator[ToDecode]:
        for message in (HELLO, *flood):
            sent.append(message)
            yield message
        await asyncio.Event().wait()

    async def write(message: ToPrefill) -> None:
        assert message == WELCOME

    link = asyncio.ensure_future(server.serve(messages(), write))
    await until(lambda: not mailbox.has_room())
    await asyncio.sleep(0.05)  # whatever would come now does not
    assert len(sent) == 4, "hello, two manifests, and one that waits"
    got = list[Event]()
    await until(lambda: got.extend(mailbox.take(0)) or FromPrefill(P, Renew(199)) in got)
    assert got == [LinkOpened(P), *(FromPrefill(P, message) for message in flood)]
    link.cancel()
    await asyncio.gather(link, return_exceptions=True)


def test_names_and_reasons_of_a_peer_are_bounded_where_they_come_in() -> None:
    """Many of them may wait for the engine at once."""
    long = "x" * MIB
    for response in (
        link_pb2.LinkResponse(open_refused=link_pb2.OpenRefused(epoch=1, reason=long)),
        link_pb2.LinkResponse(aborted=link_pb2.AbortedNotice(epoch=1, reason=long)),
    ):
        message = to_prefill_from_proto(response)
        assert getattr(message, "reason") == "x" * MAX_REASON  # noqa: B009  # of either kind
    opened = link_pb2.OpenTicket(epoch=1, incarnation="dd", request_id=long)
    with pytest.raises(InvalidArgument, match=r"link.open.request_id must have at most 512 characters, not 1048576"):
        to_decode_from_proto(link_pb2.LinkRequest(open=opened))
