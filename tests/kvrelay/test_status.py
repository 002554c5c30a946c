"""The status table is total, and an error survives the way to a client and back."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf.any_pb2 import Any
from google.rpc import error_details_pb2
from grpc.aio import AioRpcError, Metadata

from kvrelay import errors
from kvrelay.rpc import status


def family(kind: type) -> set[type]:
    return {kind}.union(*(family(child) for child in kind.__subclasses__()))


def as_received(error: errors.KVRelayError) -> AioRpcError:
    sent = status.to_grpc_status(error)
    trailers = Metadata(*sent.trailing_metadata)
    return AioRpcError(sent.code, Metadata(), trailers, details=sent.details)


def test_every_error_class_has_its_own_row_in_the_table():
    ours = {kind for kind in family(errors.KVRelayError) if kind.__module__ == "kvrelay.errors"}
    assert set(status.STATUS_TABLE) == ours - {errors.KVRelayError}


def test_every_status_code_has_an_error_class():
    assert set(status.ERROR_OF_CODE) == set(grpc.StatusCode)
    for code, kind in status.ERROR_OF_CODE.items():
        if code in status.STATUS_TABLE.values():
            assert status.STATUS_TABLE[kind] is code


@pytest.mark.parametrize("kind", list(status.STATUS_TABLE))
def test_an_error_comes_back_with_its_class_field_and_retry_time(kind):
    back = status.from_rpc_error(as_received(kind("no room for ü", field="a.b[0]", retry_after_s=1.25)))
    assert type(back) is kind
    assert (back.message, back.field, back.retry_after_s) == ("no room for ü", "a.b[0]", 1.25)
    bare = status.from_rpc_error(as_received(kind("plain")))
    hint = errors.RETRY_S if kind.retryable else None
    assert (type(bare), bare.message, bare.field, bare.retry_after_s) == (kind, "plain", "", hint)


def test_what_is_not_there_and_what_a_program_may_want_to_know_come_back():
    model = errors.Resource("model", "other")
    back = status.from_rpc_error(as_received(errors.NotFound("no model", field="model", resource=model)))
    assert (back.field, back.resource, back.metadata) == ("model", model, {})
    back = status.from_rpc_error(as_received(errors.Aborted("lost", metadata={"worker": "decode-0"})))
    assert (back.resource, back.metadata) == (None, {"worker": "decode-0"})


def test_more_trailing_metadata_leaves_the_details_as_they_are():
    sent = status.to_grpc_status(errors.NotFound("x"), (("x-request-id", "mine"),))
    assert [key for key, _ in sent.trailing_metadata] == ["grpc-status-details-bin", "x-request-id"]
    assert (sent.code, sent.details) == (grpc.StatusCode.NOT_FOUND, "x")


def test_a_status_carries_the_details_that_other_clients_read():
    sent = status.to_status(errors.ResourceExhausted("full", field="prompt", retry_after_s=0.5))
    assert (sent.code, sent.message) == (8, "full")
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    for detail, packed in zip((info, bad, retry), sent.details, strict=True):
        assert packed.Unpack(detail)
    assert (info.reason, info.domain) == ("ResourceExhausted", "kvrelay")
    assert [(v.field, v.description) for v in bad.field_violations] == [("prompt", "full")]
    assert retry.retry_delay.ToMilliseconds() == 500


def test_a_status_without_our_details_is_judged_by_its_code():
    def foreign(code: grpc.StatusCode) -> errors.KVRelayError:
        return status.from_rpc_error(AioRpcError(code, Metadata(), Metadata(), details="from a proxy"))

    assert type(foreign(grpc.StatusCode.UNAVAILABLE)) is errors.Unavailable
    assert type(foreign(grpc.StatusCode.FAILED_PRECONDITION)) is errors.FailedPrecondition
    assert type(foreign(grpc.StatusCode.UNKNOWN)) is errors.Internal
    assert foreign(grpc.StatusCode.UNKNOWN).message == "from a proxy"


def test_broken_details_and_foreign_domains_do_not_break_the_reader():
    garbage = Metadata(("grpc-status-details-bin", b"\xff\xff\xff"))
    error = AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), garbage, details="x")
    assert type(status.from_rpc_error(error)) is errors.Unavailable
    sent = status.to_status(errors.NotFound("x"))
    del sent.details[:]
    packed = Any()
    packed.Pack(error_details_pb2.ErrorInfo(reason="Internal", domain="example.com"))
    sent.details.append(packed)
    trailers = Metadata(("grpc-status-details-bin", sent.SerializeToString()))
    error = AioRpcError(grpc.StatusCode.NOT_FOUND, Metadata(), trailers, details="x")
    assert type(status.from_rpc_error(error)) is errors.NotFound
    assert type(status.from_rpc_error(grpc.RpcError("no status"))) is errors.Internal


@pytest.mark.parametrize("letter", ["x", "\u00fc", "\U0001f600"])
def test_a_status_fits_into_headers_whatever_a_caller_had_put_into_its_words(letter):
    long = letter * 100_000
    error = errors.NotFound(
        long, field=long, resource=errors.Resource("model", long), metadata={"worker": long}, retry_after_s=1.0
    )
    sent = status.to_grpc_status(error)
    escaped = 3 * len(sent.details.encode())
    assert escaped + sum(len(value) * 4 // 3 for _, value in sent.trailing_metadata) < 8000
    back = status.from_rpc_error(as_received(error))
    assert back.message == letter * ((700 - 3) // len(letter.encode())) + "..."
    assert back.resource == errors.Resource("model", letter * ((256 - 3) // len(letter.encode())) + "...")


def test_an_unknown_exception_is_internal_leaks_nothing_and_is_logged(caplog):
    try:
        raise ValueError("the password is swordfish")
    except ValueError as raised:
        error = status.as_error(raised)
    assert type(error) is errors.Internal
    assert "swordfish" not in error.message
    assert "swordfish" in caplog.text
    assert "Traceback" in caplog.text


def test_subclasses_not_in_the_table_take_the_code_of_their_parent():
    class Narrower(errors.Unavailable):
        pass

    assert status.code_of(Narrower("x")) is grpc.StatusCode.UNAVAILABLE
    assert type(status.from_rpc_error(as_received(Narrower("x")))) is errors.Unavailable
    assert status.code_of(errors.KVRelayError("x")) is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:50061: "
            "Failed to connect to remote host: Connection refused",
            "cannot reach 127.0.0.1:50061: Connection refused",
        ),
        (
            "errors resolving nope:80: [field:hostname lookup error:address lookup failed for nope:80: "
            "Domain name not found]",
            "cannot find the host of nope:80: Domain name not found",
        ),
        ("Deadline Exceeded", "the deadline passed"),
        ("Socket closed", "Socket closed"),
    ],
)
def test_what_grpc_says_of_an_address_nobody_answers_at_is_said_in_few_words(said, words):
    call = AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), details=said)
    assert status.from_rpc_error(call).message == words
