"""The bodies that the door takes, by OpenAI's names and vLLM's. Types only: values are judged by coordinator.validate.

Strict: a number in quotes is no number. Fields that are not listed are ignored, as clients of OpenAI's API expect.
What has several shapes, or too many entries to look at before they are counted, is told apart elsewhere.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class StreamOptions(Body):
    """continuous_usage_stats: each chunk says what was used so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(Body):
    """What the text must be; one of them. json_: a schema, as JSON or as a string."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: Any = None


class Generate(Body):
    """What both kinds of generation have."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int64 | None = None
    stop: Any = None
    seed: Seed | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Any = None
    max_tokens: Int64 | None = None
    max_completion_tokens: Int64 | None = None
    min_tokens: Int64 | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Int64] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Int64 | None = None
    cache_salt: str | None = None
    priority: Int64 | str | None = None
    user: str | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    response_format: dict[str, Any] | None = None
    # Known, and refused where they ask for anything.
    use_beam_search: Any = None
    length_penalty: Any = None
    prompt_logprobs: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    logits_processors: Any = None
    return_tokens_as_token_ids: Any = None
    return_token_ids: Any = None


class Completions(Generate):
    """POST /v1/completions. prompt: a string, token ids, a list of strings or a list of lists of token ids."""

    prompt: Any = None
    best_of: Int64 | None = None
    echo: bool | None = None
    logprobs: Int64 | bool | None = None
    add_special_tokens: bool | None = None
    suffix: Any = None
    prompt_embeds: Any = None


class ChatCompletions(Generate):
    """POST /v1/chat/completions."""

    messages: Any = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    # Known, and refused where they ask for anything.
    continue_final_message: Any = None
    echo: Any = None
    add_special_tokens: Any = None
    chat_template: Any = None
    documents: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None


class Tokenize(Body):
    """POST /tokenize. One of prompt and messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None


class Detokenize(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Int64]
