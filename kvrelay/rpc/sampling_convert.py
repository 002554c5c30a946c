"""How a token is drawn, its log-probabilities, a request's priority <-> protos. Knows neither work nor who sends it."""

from __future__ import annotations

import math

from kvrelay.requests import Logprobs, Priority, Sampling
from kvrelay.rpc.fields import at_least, enum_of, number, positive, present
from kvrelay.v1 import common_pb2

PRIORITY_NUMBERS = {
    Priority.BATCH: common_pb2.PRIORITY_BATCH,
    Priority.NORMAL: common_pb2.PRIORITY_NORMAL,
    Priority.INTERACTIVE: common_pb2.PRIORITY_INTERACTIVE,
}
PRIORITIES: dict[int, Priority] = {
    common_pb2.PRIORITY_UNSPECIFIED: Priority.NORMAL,
    **{number: priority for priority, number in PRIORITY_NUMBERS.items()},
}
EXPECTED = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def priority_from_proto(value: int, path: str) -> Priority:
    """Unspecified is normal."""
    return enum_of(value, PRIORITIES, path)


def sampling_to_proto(sampling: Sampling) -> common_pb2.SamplingParams:
    """Everything but the grammar, which is no part of this message."""
    return common_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        logprobs=sampling.logprobs,
    )


def sampling_from_proto(proto: common_pb2.SamplingParams, path: str = "sampling", grammar: str = "") -> Sampling:
    """Between coordinator and worker every field is set: defaults belong to the public service. Without logprobs none
    are asked for. Biases come back sorted by token id: a proto map has no order.
    """
    for name in EXPECTED:
        present(proto, name, path)
    positive(proto.top_p, f"{path}.top_p")
    return Sampling(
        temperature=number(proto.temperature, f"{path}.temperature"),
        top_p=number(proto.top_p, f"{path}.top_p", high=1.0),
        top_k=at_least(proto.top_k, 0, f"{path}.top_k"),
        seed=proto.seed,
        min_p=number(proto.min_p, f"{path}.min_p", high=1.0),
        repetition_penalty=positive(proto.repetition_penalty, f"{path}.repetition_penalty"),
        presence_penalty=number(proto.presence_penalty, f"{path}.presence_penalty", low=-math.inf),
        frequency_penalty=number(proto.frequency_penalty, f"{path}.frequency_penalty", low=-math.inf),
        logit_bias=_biases_from_proto(proto, f"{path}.logit_bias"),
        grammar=grammar,
        logprobs=at_least(proto.logprobs, 0, f"{path}.logprobs") if proto.HasField("logprobs") else None,
    )


def _biases_from_proto(proto: common_pb2.SamplingParams, path: str) -> tuple[tuple[int, float], ...]:
    return tuple(
        (token, number(added, f"{path}[{token}]", low=-math.inf)) for token, added in sorted(proto.logit_bias.items())
    )


def add_logprobs(proto: common_pb2.Logprobs, logprobs: Logprobs) -> None:
    """Fills a message that is part of another one: with many tokens in a message a copy of each would cost most."""
    proto.token = logprobs.token
    add = proto.top.add
    for token_id, logprob in logprobs.top:
        top = add()
        top.token_id = token_id
        top.logprob = logprob


def logprobs_from_proto(proto: common_pb2.Logprobs) -> Logprobs:
    """Figures pass as they are: they decide nothing."""
    return Logprobs(proto.token, tuple((top.token_id, top.logprob) for top in proto.top))
