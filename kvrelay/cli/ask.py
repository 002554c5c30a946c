"""One request from the command line: reads the prompt, has it answered, prints answer or error, gives an exit code."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Protocol

from kvrelay.cli.problems import EXIT_FAILED, EXIT_INTERRUPTED, report
from kvrelay.cli.prompt import read_prompt
from kvrelay.client import AsyncClient, Choice, GenerateOptions, GenerateResult, Logprobs, Prompt
from kvrelay.errors import KVRelayError


class Listener(Protocol):
    """Hears of an answer while it comes: each piece of text as it becomes certain, each sequence when it has ended.

    The tail of a sequence comes with `choice` alone. prompt: once, before all else, if it is to be echoed.
    """

    def prompt(self, text: str) -> None: ...

    def text(self, piece: str) -> None: ...

    def choice(self, choice: Choice) -> None: ...


Ask = Callable[[Prompt, Listener], GenerateResult]
"""Answers a prompt; raises KVRelayError."""


def ask_cluster(target: str, options: GenerateOptions) -> Ask:
    """Asks the coordinator at `target`. Ctrl-C cancels the request there."""

    async def stream(prompt: Prompt, listener: Listener) -> GenerateResult:
        async with AsyncClient(target) as client, client.generate(prompt, **options) as tokens:
            tokens.tell_choices(listener.choice)
            async for token in tokens:
                if len(tokens.tokens) == 1 and tokens.prompt_text:
                    listener.prompt(tokens.prompt_text)
                listener.text(token.text)
            return tokens.result

    return lambda prompt, listener: asyncio.run(stream(prompt, listener))


def answer(ask: Ask, prompt: str | None, tokens_file: str, chat: bool, as_json: bool, n: int = 1) -> int:
    """Print the answer: as it comes, or as one JSON object. An error leaves stdout as it is."""
    printed: _Streaming | _Whole = _Streaming(enabled=not as_json) if n == 1 else _Whole(n, enabled=not as_json)
    try:
        result = ask(read_prompt(prompt, tokens_file, chat), printed)
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
    """What `generate --json` prints; times in ms as this client saw them. Several answers: also all of them."""
    of_all: dict[str, object] = {"request_id": result.request_id, "seed": result.seed, "model": result.model}
    if result.prompt_text:
        of_all["prompt_text"] = result.prompt_text
    if len(result.choices) < 2:
        return of_all | _of_one(result)
    choices = [{"sequence": choice.sequence} | _of_one(choice) for choice in result.choices]
    return of_all | _of_one(result) | {"choices": choices}


def _of_one(choice: Choice | GenerateResult) -> dict[str, object]:
    of_one: dict[str, object] = {
        "token_ids": list(choice.token_ids),
        "text": choice.text,
        "finish_reason": choice.finish_reason,
        "usage": asdict(choice.usage),
        "ttft_ms": None if choice.ttft_ms is None else round(choice.ttft_ms, 3),
        "gaps_ms": [round(gap, 3) for gap in choice.gaps_ms],
        "prefill_worker": choice.prefill_worker,
        "decode_worker": choice.decode_worker,
        "hand_off": asdict(choice.hand_off) if choice.hand_off else None,
        "migrations": choice.migrations,
    }
    if choice.logprobs:
        of_one["logprobs"] = [_logprobs(one) for one in choice.logprobs]
    return of_one


def _logprobs(told: Logprobs) -> dict[str, object]:
    """Of one token. top: the likeliest ones, likeliest first."""
    top = [{"token_id": token_id, "logprob": logprob} for token_id, logprob in told.top]
    return {"logprob": told.token, "top": top}


class _Streaming:
    """Text on stdout as it comes, with a line end after it if there was any."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._any = False

    def prompt(self, text: str) -> None:
        self.text(text)

    def text(self, piece: str) -> None:
        if self._enabled and piece:
            self._any = True
            print(piece, end="", flush=True)

    def choice(self, choice: Choice) -> None:
        self.text(choice.tail)

    def end(self) -> None:
        if self._any:
            print(flush=True)


class _Whole:
    """One of n answers at a time, whole, as they end: the text on stdout, its number on stderr."""

    def __init__(self, n: int, enabled: bool) -> None:
        self._n = n
        self._enabled = enabled
        self._prompt = ""

    def prompt(self, text: str) -> None:
        self._prompt = text

    def text(self, piece: str) -> None:
        """They come all at once, so nothing is shown before its answer has ended."""

    def choice(self, choice: Choice) -> None:
        if self._enabled:
            print(f"[{choice.sequence + 1} of {self._n}: {choice.finish_reason}]", file=sys.stderr, flush=True)
            print(self._prompt + choice.text, flush=True)

    def end(self) -> None:
        """Every answer has its line end already."""
