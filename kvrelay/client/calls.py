"""Every unary call as a value: path, request, how to read the answer. Both clients run these; neither knows a proto."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message

from kvrelay.client.request import assign, extend
from kvrelay.client.values import Blocks, ModelInfo, Topology, WorkerStatus
from kvrelay.v1 import admin_pb2, common_pb2, inference_pb2, model_pb2

R = TypeVar("R", bound=Message)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Operation(Generic[R, T]):
    """A unary call: what to send where, and how to read what comes back."""

    path: str
    request: Message
    parse: Callable[[bytes], R]
    read: Callable[[R], T]


def tokenize(text: str, model: str) -> Operation[inference_pb2.TokenizeResponse, list[int]]:
    request = inference_pb2.TokenizeRequest(model=model)
    assign(request, "text", text, "text")
    path = "/kvrelay.v1.InferenceService/Tokenize"
    return Operation(path, request, inference_pb2.TokenizeResponse.FromString, lambda answer: list(answer.token_ids))


def detokenize(token_ids: Sequence[int], model: str) -> Operation[inference_pb2.DetokenizeResponse, str]:
    request = inference_pb2.DetokenizeRequest(model=model)
    extend(request.token_ids, token_ids, "token_ids")
    path = "/kvrelay.v1.InferenceService/Detokenize"
    return Operation(path, request, inference_pb2.DetokenizeResponse.FromString, lambda answer: answer.text)


def list_models() -> Operation[model_pb2.ListModelsResponse, list[str]]:
    request, parse = model_pb2.ListModelsRequest(), model_pb2.ListModelsResponse.FromString
    return Operation("/kvrelay.v1.ModelService/ListModels", request, parse, lambda answer: list(answer.model_ids))


def get_model(model: str) -> Operation[model_pb2.GetModelResponse, ModelInfo]:
    request, parse = model_pb2.GetModelRequest(model=model), model_pb2.GetModelResponse.FromString
    return Operation("/kvrelay.v1.ModelService/GetModel", request, parse, _model_info)


def topology() -> Operation[admin_pb2.GetTopologyResponse, Topology]:
    request, parse = admin_pb2.GetTopologyRequest(), admin_pb2.GetTopologyResponse.FromString
    return Operation("/kvrelay.v1.AdminService/GetTopology", request, parse, _topology)


def drain_worker(worker_id: str, grace_s: float) -> Operation[admin_pb2.DrainWorkerResponse, None]:
    request = admin_pb2.DrainWorkerRequest(worker_id=worker_id, grace_s=grace_s)
    parse = admin_pb2.DrainWorkerResponse.FromString
    return Operation("/kvrelay.v1.AdminService/DrainWorker", request, parse, lambda _: None)


def _model_info(answer: model_pb2.GetModelResponse) -> ModelInfo:
    return ModelInfo(
        model_id=answer.identity.model_id,
        fingerprint=answer.identity.fingerprint,
        vocab_size=answer.identity.vocab_size,
        context_limit=answer.context_limit,
        eos_token_ids=tuple(answer.eos_token_ids),
        block_size=answer.block_size,
        chat_template=answer.chat_template,
        max_stop_strings=answer.max_stop_strings,
        max_stop_string_bytes=answer.max_stop_string_bytes,
        max_n=answer.max_n,
        max_request_bytes=answer.max_request_bytes,
        smallest_cacheable_prefix=answer.smallest_cacheable_prefix,
        max_logit_bias=answer.max_logit_bias,
        max_logprobs=answer.max_logprobs,
        max_grammar_bytes=answer.max_grammar_bytes,
        max_text_bytes=answer.max_text_bytes,
        max_token_ids=answer.max_token_ids,
    )


def _topology(answer: admin_pb2.GetTopologyResponse) -> Topology:
    return {
        "coordinator_id": answer.coordinator_id,
        "queued_requests": answer.queued_requests,
        "open_requests": answer.open_requests,
        "workers": [_worker_status(worker) for worker in answer.workers],
        "counters": dict(answer.counters),
    }


def _worker_status(worker: admin_pb2.WorkerStatus) -> WorkerStatus:
    about, load = worker.description, worker.load
    known = about.role in common_pb2.Role.values()
    return {
        "id": about.worker_id,
        "role": common_pb2.Role.Name(about.role).removeprefix("ROLE_").lower() if known else str(about.role),
        "incarnation": about.incarnation,
        "pid": about.pid,
        "address": about.address,
        "transport": about.transport,
        "executor": about.executor,
        "blocks": _blocks(load.blocks),
        "running": load.running,
        "waiting": load.waiting,
        "queued_tokens": load.queued_tokens,
        "transfers_in_flight": load.transfers_in_flight,
        "tokens_per_s": load.tokens_per_s,
        "draining": load.draining,
        "unwell": load.unwell,
        "silent_s": worker.silent_s,
        "counters": dict(load.counters),
    }


def _blocks(counts: common_pb2.BlockCounts) -> Blocks:
    return {
        "total": counts.total,
        "free": counts.free,
        "held": counts.held,
        "cached": counts.cached,
        "reserved": counts.reserved,
        "quarantined": counts.quarantined,
    }
