"""POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

import json

from coordinator.http.calls import Call
from coordinator.http.chat_completions import TEMPLATE_NAMES, variables_of
from coordinator.http.parsing import parse, wrong
from coordinator.http.prompts import messages_of
from coordinator.http.schemas import Detokenize, Tokenize
from coordinator.raw import RawRequest
from coordinator.text import IDS_AT_ONCE


async def tokenize(call: Call) -> None:
    """The tokens of a text, or of messages as a chat would send them to the model."""
    body = parse(Tokenize, await call.body())
    async with call.in_time():
        answer = await _tokenized(call, body)
    await call.answer_text(answer)


async def _tokenized(call: Call, body: Tokenize) -> str:
    serving = call.door.serving
    model, special = body.model or "", body.add_special_tokens
    call.names = TEMPLATE_NAMES
    if body.messages is not None:
        raw = RawRequest(
            model=model, chat=messages_of(body.messages), tools=body.tools, template_variables=variables_of(body)
        )
        token_ids = list(await serving.prompt_tokens(raw))
    elif body.prompt is not None:
        token_ids = await serving.tokenize(model, body.prompt, special is not False)
    else:
        raise wrong("prompt", "one of prompt and messages must be set")
    return await serving.tokenizing.aside(len(token_ids), answer_of, token_ids, serving.limits.context_limit)


def answer_of(token_ids: list[int], context_limit: int) -> str:
    """As JSON, in pieces: other threads run between them."""
    pieces = (token_ids[start : start + IDS_AT_ONCE] for start in range(0, len(token_ids), IDS_AT_ONCE))
    tokens = ", ".join([json.dumps(piece)[1:-1] for piece in pieces])
    return f'{{"count": {len(token_ids)}, "max_model_len": {context_limit}, "tokens": [{tokens}]}}'


async def detokenize(call: Call) -> None:
    body, serving = parse(Detokenize, await call.body()), call.door.serving
    call.names = {"token_ids": "tokens"}
    async with call.in_time():
        text = await serving.detokenize(body.model or "", body.tokens)
    await call.answer({"prompt": text})
