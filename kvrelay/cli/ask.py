"""One request from the command line: reads the prompt, has it answered, prints answer or error, gives an exit code."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict

from kvrelay.cli.problems import EXIT_FAILED, EXIT_INTERRUPTED, report
from kvrelay.cli.prompt import read_prompt
from kvrelay.client import AsyncClient, GenerateOptions, GenerateResult, Prompt
from kvrelay.errors import KVRelayError

OnText = Callable[[str], None]
Ask = Callable[[Prompt, OnText], GenerateResult]
"""Answers a prompt, handing out each piece of text as it becomes certain; raises KVRelayError."""


def ask_cluster(target: str, options: GenerateOptions) -> Ask:
    """Asks the coordinator at `target`. Ctrl-C cancels the request there."""

    async def stream(prompt: Prompt, on_text: OnText) -> GenerateResult:
        async with AsyncClient(target) as client, client.generate(prompt, **options) as tokens:
            async for token in tokens:
                on_text(token.text)
            on_text(tokens.result.tail)
            return tokens.result

    return lambda prompt, on_text: asyncio.run(stream(prompt, on_text))


def answer(ask: Ask, prompt: str | None, tokens_file: str, chat: bool, as_json: bool) -> int:
    """Print the answer: as it comes, or as one JSON object. An error leaves stdout as it is."""
    printed = _Streaming(enabled=not as_json)
    try:
        result = ask(read_prompt(prompt, tokens_file, chat), printed.write)
    except KVRelayError as error:
        printed.end()
        report(error, as_json)
        return EXIT_FAILED
    except KeyboardInterrupt:
        printed.end()
        return EXIT_INTERRUPTED
    printed.end()
    if as_json:
        print(json.dumps(result_object(result), ensure_ascii=False), flush=True)
    return 0


def result_object(result: GenerateResult) -> dict[str, object]:
    """What `generate --json` prints; times in ms as this client saw them."""
    return {
        "request_id": result.request_id,
        "token_ids": list(result.token_ids),
        "text": result.text,
        "finish_reason": result.finish_reason,
        "usage": asdict(result.usage),
        "ttft_ms": None if result.ttft_ms is None else round(result.ttft_ms, 3),
        "gaps_ms": [round(gap, 3) for gap in result.gaps_ms],
        "prefill_worker": result.prefill_worker,
        "decode_worker": result.decode_worker,
        "seed": result.seed,
        "model": result.model,
        "hand_off": asdict(result.hand_off) if result.hand_off else None,
        "migrations": result.migrations,
    }


class _Streaming:
    """Text on stdout as it comes, with a line end after it if there was any."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._any = False

    def write(self, text: str) -> None:
        if self._enabled and text:
            self._any = True
            print(text, end="", flush=True)

    def end(self) -> None:
        if self._any:
            print(flush=True)
