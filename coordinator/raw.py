"""What a client sent, in plain values, and what it is held to. Judges nothing: that is coordinator/validate.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.constraints import Constraint
from kvrelay.requests import Priority

Message = Mapping[str, Any]
"""One of a chat, as the template reads it: role and content, and what else it has (name, tool_calls, ...)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must keep to. context_limit: prompt and output tokens together."""

    model_id: str
    vocab_size: int
    context_limit: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool = False


@dataclass(frozen=True, slots=True)
class RawRequest:
    """None where a field was absent. Exactly one of text, token_ids and chat should be set.

    left_out: tokens that the door has cut off already, for truncate_prompt, in front of token_ids. usual_tokens: most
    tokens of the output where max_tokens is absent and there is room for so many; None: as many as there is room for.
    """

    model: str = ""
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    chat: tuple[Message, ...] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    usual_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int | None = None
    cache_salt: str = ""
    client_request_id: str = ""
    prefix_cache: bool | None = None
    tools: Sequence[Any] | None = None
    template_variables: Mapping[str, Any] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    min_tokens: int | None = None
    include_stop: bool = False
    echo: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    truncate_prompt: int | None = None
    left_out: int = 0
    priority: Priority = Priority.NORMAL
    constraint: Constraint | None = None

    @property
    def prompt_field(self) -> str:
        """The name of the field that the prompt came in."""
        if self.text is not None:
            return "text"
        return "tokens.ids" if self.token_ids is not None else "chat"
