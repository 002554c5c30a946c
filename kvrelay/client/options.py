"""What a caller may say of a generation, in plain values. Knows no proto; the server judges nearly all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

ChatMessage = Mapping[str, Any]
"""role, content, and whatever else the model's chat template reads (name, tool_calls, ...), as JSON has it.

content may be absent or None, as it is beside tool calls: the template sees an empty text.
"""
Prompt = str | Sequence[int] | Sequence[ChatMessage]
"""Text, token ids, or chat messages."""
PriorityName = Literal["batch", "normal", "interactive"]


class SamplingOptions(TypedDict, total=False):
    """How tokens are drawn; what is absent or None takes the server's default.

    min_p: drop tokens less likely than this share of the likeliest. repetition_penalty: of tokens in prompt or output,
    1 is off; presence_penalty, frequency_penalty: of tokens in the output, once each or for each time, 0 is off.
    logit_bias: token id -> what is added to its logit. logprobs: tell the log-probability of each token, and of so
    many of the likeliest; see TokenEvent.
    """

    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float]
    logprobs: int | None


class PromptOptions(TypedDict, total=False):
    """How a prompt becomes tokens. tools, template_variables: for the chat template, so of chat messages only.

    echo: GenerateResult.prompt_text says the prompt as the server had it. add_special_tokens: the tokenizer's own, to
    a prompt given as text (default True). truncate_prompt: use only the last so many tokens of it.
    """

    echo: bool | None
    add_special_tokens: bool | None
    truncate_prompt: int | None
    tools: Sequence[Mapping[str, Any]] | None
    template_variables: Mapping[str, Any] | None


class ConstraintOptions(TypedDict, total=False):
    """What the whole text of the output must be: at most one of these.

    json_schema: a schema, as a mapping or as JSON; {} is any object. choice: one of these texts. lark, ebnf: a grammar
    in Lark's notation, or in GBNF.
    """

    json_schema: str | Mapping[str, Any] | None
    regex: str | None
    choice: Sequence[str] | None
    lark: str | None
    ebnf: str | None


class GenerateOptions(SamplingOptions, PromptOptions, ConstraintOptions, total=False):
    """Options of a generation; what is absent or None takes the server's default.

    stop: strings that end the text, and are part of it only with include_stop, as is the text of stop tokens.
    min_tokens: nothing but length ends the text before, or a constraint that leaves no other way.
    skip_special_tokens: leave their text out (default True). deadline_s: for the whole stream.
    request_label: the caller's own name for the request, for logs; never a key. n: sequences from one prompt, each
    drawn from a seed of its own; see GenerateResult.choices. prefix_cache: False neither uses nor fills caches.
    priority: who goes first where not all can.
    """

    max_tokens: int | None
    min_tokens: int | None
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop: bool | None
    ignore_eos: bool | None
    skip_special_tokens: bool | None
    model: str
    deadline_s: float | None
    request_label: str
    cache_salt: str | None
    n: int | None
    prefix_cache: bool | None
    priority: PriorityName | None
