"""kvrelay.v1.ModelService: the limits that requests are held to. Knows no requests."""

from __future__ import annotations

from coordinator import validate
from coordinator.model_facts import ServedModel
from coordinator.roster import Roster
from kvrelay.config import CoordinatorConfig
from kvrelay.rpc.convert import model_to_proto
from kvrelay.v1 import model_pb2, model_pb2_grpc

SMALLEST_PREFIX = 2
"""Tokens: only full blocks are cached, and the last token of a prompt is always computed."""


class ModelService(model_pb2_grpc.ModelServiceServicer):
    def __init__(self, config: CoordinatorConfig, model: ServedModel, roster: Roster) -> None:
        self._config = config
        self._model = model
        self._roster = roster

    async def ListModels(self, request: model_pb2.ListModelsRequest, context: object) -> model_pb2.ListModelsResponse:
        return model_pb2.ListModelsResponse(model_ids=[self._model.identity.model_id])

    async def GetModel(self, request: model_pb2.GetModelRequest, context: object) -> model_pb2.GetModelResponse:
        limits = self._model.limits(self._roster.context_limit)
        validate.check_model(request.model, limits)
        block_size = self._roster.block_size
        return model_pb2.GetModelResponse(
            identity=model_to_proto(self._model.identity),
            context_limit=limits.context_limit,
            eos_token_ids=limits.eos_token_ids,
            max_stop_strings=validate.MAX_STOP_STRINGS,
            max_stop_string_bytes=validate.MAX_STOP_STRING_BYTES,
            max_n=validate.MAX_N,
            max_request_bytes=self._config.max_request_bytes,
            block_size=block_size,
            chat_template=limits.has_chat_template,
            smallest_cacheable_prefix=max(SMALLEST_PREFIX, block_size) if self._roster.caches else 0,
            max_logit_bias=validate.MAX_LOGIT_BIAS,
            max_logprobs=validate.MAX_LOGPROBS,
            max_grammar_bytes=validate.MAX_GRAMMAR_BYTES,
            max_text_bytes=validate.MAX_TEXT_BYTES,
            max_token_ids=validate.MAX_TOKEN_IDS,
        )
