"""A client that knows nothing but an address: all it says and reads is built from what the server tells of itself.

No generated code of kvrelay.v1 is used here, only gRPC's reflection, google.rpc and the standard health service's name.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status
from support.cluster import Cluster, running_cluster, until

pytestmark = pytest.mark.e2e

INFERENCE = "kvrelay.v1.InferenceService"
OPEN_LIMIT = 2
FLAGS = ("--executor", "hash", "--transport", "grpc", "--num-blocks", "64", "--step-seconds", "0.01")
LONG = {"text": "a", "maxTokens": 900, "ignoreEos": True}
"""Nine seconds of steps at the least."""


class Server:
    """One server through its reflection. Requests and answers are dicts as JSON has them (int64 is text)."""

    def __init__(self, target: str) -> None:
        self.channel = grpc.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)])
        self.database = ProtoReflectionDescriptorDatabase(self.channel)
        self.pool = DescriptorPool(self.database)

    def method(self, service: str, name: str) -> MethodDescriptor:
        return self.pool.FindServiceByName(service).methods_by_name[name]

    def call(self, service: str, name: str, request: dict[str, Any], **options: Any) -> Any:
        """The call itself; iterate it where the method streams."""
        method = self.method(service, name)
        ask, answer = (message_factory.GetMessageClass(m) for m in (method.input_type, method.output_type))
        make = self.channel.unary_stream if method.server_streaming else self.channel.unary_unary
        stub = make(
            f"/{service}/{name}", request_serializer=ask.SerializeToString, response_deserializer=answer.FromString
        )
        message = json_format.ParseDict(request, ask(), descriptor_pool=self.pool)
        options.setdefault("timeout", 30.0)
        return stub(message, **options) if method.server_streaming else stub.future(message, **options)

    def ask(self, service: str, name: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
        return json_format.MessageToDict(self.call(service, name, request or {}).result(), descriptor_pool=self.pool)

    def refusal(self, service: str, name: str, request: dict[str, Any]) -> grpc.RpcError:
        with pytest.raises(grpc.RpcError) as raised:
            self.call(service, name, request).result()
        return raised.value

    def generate(self, request: dict[str, Any], **options: Any) -> Any:
        return self.call(INFERENCE, "Generate", request, **options)

    def answer(self, request: dict[str, Any]) -> Answer:
        messages = [json_format.MessageToDict(m, descriptor_pool=self.pool) for m in self.generate(request)]
        assert set(messages[0]) == {"accepted"}
        assert set(messages[-1]) == {"finished"}
        tokens = [m["token"] for m in messages[1:-1]]
        text = "".join(t.get("text", "") for t in tokens) + messages[-1]["finished"].get("text", "")
        ids = [int(t.get("tokenId", 0)) for t in tokens]
        return Answer(messages[0]["accepted"], ids, text, messages[-1]["finished"])

    def open_requests(self) -> int:
        return int(self.ask("kvrelay.v1.AdminService", "GetTopology").get("openRequests", 0))

    def health(self, service: str = "") -> str:
        return str(self.ask("grpc.health.v1.Health", "Check", {"service": service})["status"])


@dataclass(frozen=True)
class Answer:
    accepted: dict[str, Any]
    ids: list[int]
    text: str
    finished: dict[str, Any]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVRELAY_OPEN_LIMIT", str(OPEN_LIMIT))
        with running_cluster(tmp_path_factory.mktemp("reflection") / "log", *FLAGS) as cluster:
            yield cluster


@pytest.fixture
def server(cluster: Cluster) -> Iterator[Server]:
    server = Server(cluster.target)
    until(lambda: server.open_requests() == 0, 10.0, "nothing is open")
    yield server
    server.channel.close()


def details_of(error: grpc.RpcError) -> dict[str, dict[str, Any]]:
    """Name of each detail -> what it says."""
    assert isinstance(error, grpc.Call)
    status = rpc_status.from_call(error)
    kinds = [getattr(error_details_pb2, n) for n in ("ErrorInfo", "BadRequest", "RetryInfo", "ResourceInfo")]
    found = {}
    for packed in status.details if status is not None else ():
        detail = next(kind() for kind in kinds if packed.Is(kind.DESCRIPTOR))
        packed.Unpack(detail)
        found[detail.DESCRIPTOR.name] = json_format.MessageToDict(detail)
    return found


def refused(call: Any) -> grpc.RpcError:
    """The error of a stream."""
    with pytest.raises(grpc.RpcError) as raised:
        list(call)
    return raised.value


def fields_of(message: Any, path: str = "") -> Iterator[tuple[str, FieldDescriptor]]:
    for field in message.fields:
        yield f"{path}{field.name}", field
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            yield from fields_of(field.message_type, f"{path}{field.name}.")


def test_the_server_lists_its_services_and_describes_every_method(server: Server) -> None:
    names = set(server.database.get_services())
    ours = {f"kvrelay.v1.{n}Service" for n in ("Inference", "Model", "Admin", "Registry")}
    assert names >= ours | {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    for name in names:
        assert server.pool.FindServiceByName(name).methods
    assert server.method(INFERENCE, "Generate").server_streaming
    assert not server.method(INFERENCE, "Tokenize").server_streaming


def test_the_request_is_found_with_all_its_fields(server: Server) -> None:
    request = server.pool.FindMessageTypeByName("kvrelay.v1.GenerateRequest")
    assert server.method(INFERENCE, "Generate").input_type == request
    fields = dict(fields_of(request))
    assert {"model", "text", "tokens.ids", "chat.messages.role", "max_tokens", "sampling.seed"} <= set(fields)
    assert fields["sampling.temperature"].has_presence
    assert {f.name for f in request.oneofs_by_name["prompt"].fields} == {"text", "tokens", "chat"}


def test_a_stream_repeats_its_tokens_with_the_same_seed(server: Server) -> None:
    request = {"text": "the cat sat", "maxTokens": 24, "ignoreEos": True, "sampling": {"temperature": 1.0}}
    first = server.answer(request)
    assert len(first.ids) == 24
    assert first.finished["reason"] == "FINISH_REASON_LENGTH"
    assert first.finished["usage"]["completionTokens"] == 24
    again = server.answer({**request, "sampling": {"temperature": 1.0, "seed": first.accepted["seed"]}})
    assert (again.ids, again.text) == (first.ids, first.text)
    assert again.accepted["requestId"] != first.accepted["requestId"]
    other = server.answer({**request, "sampling": {"temperature": 1.0, "seed": str(int(first.accepted["seed"]) ^ 1)}})
    assert other.ids != first.ids


def test_text_as_tokens_is_the_same_prompt_and_comes_back(server: Server) -> None:
    text = "naïve 猫 \U0001f600"
    ids = server.ask(INFERENCE, "Tokenize", {"text": text})["tokenIds"]
    assert server.ask(INFERENCE, "Detokenize", {"tokenIds": ids}) == {"text": text}
    greedy = {"maxTokens": 6, "ignoreEos": True, "sampling": {"temperature": 0.0}}
    assert server.answer({"tokens": {"ids": ids}, **greedy}).ids == server.answer({"text": text, **greedy}).ids


def test_the_model_tells_its_limits_and_holds_to_them(server: Server) -> None:
    (name,) = server.ask("kvrelay.v1.ModelService", "ListModels")["modelIds"]
    model = server.ask("kvrelay.v1.ModelService", "GetModel", {"model": name})
    assert model["identity"]["modelId"] == name
    assert (model["contextLimit"], model["blockSize"]) == (1024, 16)
    over = server.generate({"text": "a", "n": model["maxN"] + 1})
    assert details_of(refused(over))["BadRequest"]["fieldViolations"][0]["field"] == "n"


def test_the_workers_are_listed_and_describe_themselves(server: Server) -> None:
    workers = [w["description"] for w in server.ask("kvrelay.v1.AdminService", "GetTopology")["workers"]]
    assert sorted(w["role"] for w in workers) == ["ROLE_DECODE", "ROLE_PREFILL"]
    for about in workers:
        service = f"kvrelay.v1.{about['role'].removeprefix('ROLE_').title()}Service"
        worker = Server(about["address"])
        assert service in worker.database.get_services()
        assert (worker.health(), worker.health(service)) == ("SERVING", "SERVING")
        worker.channel.close()


def test_health_answers_for_the_process_its_services_and_each_role(server: Server) -> None:
    for name in ("", INFERENCE, "kvrelay.v1.ModelService", "kvrelay.prefill", "kvrelay.decode"):
        until(lambda name=name: server.health(name) == "SERVING", 5.0, f"{name!r} is ready")
    unknown = server.refusal("grpc.health.v1.Health", "Check", {"service": "kvrelay.nothing"})
    assert unknown.code() is grpc.StatusCode.NOT_FOUND
    watch = server.call("grpc.health.v1.Health", "Watch", {"service": "kvrelay.decode"})
    assert json_format.MessageToDict(next(watch), descriptor_pool=server.pool) == {"status": "SERVING"}
    watch.cancel()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"sampling": {"temperature": -1}}, "sampling.temperature"),
        ({"sampling": {"topP": 2}}, "sampling.top_p"),
        ({"maxTokens": 0}, "max_tokens"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"text": ""}, "text"),
        ({"stopTokenIds": [1, 100000]}, "stop_token_ids[1]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_field_is_named_by_its_path(server: Server, changes: dict[str, Any], field: str) -> None:
    error = refused(server.generate({"text": "a", "maxTokens": 2, **changes}))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = details_of(error)
    assert details["ErrorInfo"] == {"reason": "InvalidArgument", "domain": "kvrelay"}
    assert details["BadRequest"]["fieldViolations"] == [{"field": field, "description": error.details()}]
    assert field.partition("[")[0] in dict(fields_of(server.method(INFERENCE, "Generate").input_type))


def test_what_is_not_there_is_named_as_a_resource(server: Server) -> None:
    for error, kind, name in (
        (refused(server.generate({"text": "a", "model": "other"})), "model", "other"),
        (server.refusal("kvrelay.v1.ModelService", "GetModel", {"model": "other"}), "model", "other"),
        (server.refusal("kvrelay.v1.AdminService", "DrainWorker", {"workerId": "w9"}), "worker", "w9"),
    ):
        assert error.code() is grpc.StatusCode.NOT_FOUND
        said = details_of(error)["ResourceInfo"]
        assert (said["resourceType"], said["resourceName"]) == (kind, name)


def test_where_it_is_full_the_caller_hears_when_to_try_again(server: Server) -> None:
    held = [server.generate(LONG) for _ in range(OPEN_LIMIT)]
    for call in held:
        next(call)
    error = refused(server.generate(LONG))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    details = details_of(error)
    assert details["RetryInfo"] == {"retryDelay": "1s"}
    assert details["ErrorInfo"]["metadata"] == {"limit": "open_limit", "most": str(OPEN_LIMIT)}
    for call in held:
        call.cancel()


def test_a_deadline_ends_a_stream_in_the_middle_and_nothing_stays_open(server: Server) -> None:
    call = server.generate(LONG, timeout=1.5)
    next(call)
    error = refused(call)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    until(lambda: server.open_requests() == 0, 5.0, "it is closed")


def test_a_deadline_that_has_passed_is_told_at_once(server: Server) -> None:
    assert refused(server.generate(LONG, timeout=0.0)).code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_without_a_deadline_a_stream_ends_well(server: Server) -> None:
    messages = list(server.generate({"text": "a", "maxTokens": 3, "ignoreEos": True}, timeout=None))
    assert len(messages) == 5


def test_a_cancelled_stream_ends_and_nothing_stays_open(server: Server) -> None:
    call = server.generate(LONG)
    next(call)
    threading.Timer(0.2, call.cancel).start()
    error = refused(call)
    assert error.code() is grpc.StatusCode.CANCELLED
    until(lambda: server.open_requests() == 0, 5.0, "it is closed")


def test_ids_come_back_with_answers_and_with_refusals(server: Server) -> None:
    headers = (("x-request-id", "mine"),)
    call = server.generate({"text": "a", "maxTokens": 2}, metadata=headers)
    told = dict(call.initial_metadata())
    first = json_format.MessageToDict(next(call), descriptor_pool=server.pool)
    assert told["x-request-id"] == "mine"
    assert told["x-kvrelay-request-id"] == first["accepted"]["requestId"]
    list(call)
    error = refused(server.generate({"text": ""}, metadata=headers))
    assert isinstance(error, grpc.Call)
    told = dict(error.trailing_metadata())
    assert told["x-request-id"] == "mine"
    assert len(told["x-kvrelay-request-id"]) == 32
    long = refused(server.generate({"text": "a"}, metadata=(("x-request-id", "x" * 257),)))
    assert details_of(long)["BadRequest"]["fieldViolations"][0]["field"] == "x-request-id"


def test_a_method_that_is_not_there_is_refused_with_details(server: Server) -> None:
    error = refused(server.channel.unary_stream(f"/{INFERENCE}/Nothing")(b"", timeout=5.0))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert details_of(error)["ErrorInfo"] == {"reason": "Unimplemented", "domain": "kvrelay"}
