"""POST /v1/completions: from its body to what is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

from coordinator.http.fields import HARMLESS, Common, common
from coordinator.http.generation import Asked
from coordinator.http.parsing import parse, refuse, wrong
from coordinator.http.prompts import MAX_CHOICES, Prompt, prompts_of
from coordinator.http.schemas import Completions, Generate
from coordinator.http.shapes import COMPLETION
from coordinator.raw import RawRequest
from kvrelay.errors import Unimplemented

USUAL_TOKENS = 16
"""Most tokens of an answer where the body says nothing, as in OpenAI's API."""


def completions(raw: bytes | bytearray, label: str) -> Asked:
    """label: from the header x-request-id. InvalidArgument or Unimplemented names the field."""
    body = parse(Completions, raw)
    refuse(body, HARMLESS, ("suffix", "prompt_embeds"))
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise Unimplemented("best_of: is not supported, but for the same number as n", field="best_of")
    logprobs = _logprobs(body)
    if body.echo and logprobs is not None:
        raise Unimplemented("logprobs: are not computed for a prompt, so not together with echo", field="logprobs")
    both = common(body, label)
    prompts = prompts_of(body.prompt)
    if len(prompts) > 1 and len(prompts) * (body.n or 1) > MAX_CHOICES:
        raise wrong("n", f"at most {MAX_CHOICES} choices in all, not {body.n} of each of {len(prompts)} prompts")
    says_usage, counts = options(body)
    in_list = isinstance(body.prompt, list) and type(body.prompt[0]) is not int
    return Asked(COMPLETION, _Requests(body, both, prompts), both.names, bool(body.stream), says_usage, counts, in_list)


@dataclass(frozen=True, slots=True)
class _Requests(Sequence[RawRequest]):
    """One for each prompt, made when it is asked for: a body that is refused as a whole never has them."""

    body: Completions
    both: Common
    prompts: Sequence[Prompt]

    def __len__(self) -> int:
        return len(self.prompts)

    @overload
    def __getitem__(self, at: int) -> RawRequest: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[RawRequest]: ...

    def __getitem__(self, at: int | slice) -> RawRequest | Sequence[RawRequest]:
        if isinstance(at, slice):
            return _Requests(self.body, self.both, self.prompts[at])
        return _request(self.body, self.both, self.prompts[at])


def _request(body: Completions, both: Common, prompt: Prompt) -> RawRequest:
    given: dict[str, Any] = {"text": prompt} if isinstance(prompt, str) else {"token_ids": prompt}
    return RawRequest(
        **both.fields,
        **given,
        logprobs=_logprobs(body),
        echo=bool(body.echo),
        add_special_tokens=body.add_special_tokens is not False,
        usual_tokens=USUAL_TOKENS,
    )


def _logprobs(body: Completions) -> int | None:
    """How many of the likeliest to report. False, as chats have it, asks for none at all."""
    if isinstance(body.logprobs, bool):
        if body.logprobs:
            raise wrong("logprobs", "must be a number, how many of the likeliest to report, or null")
        return None
    return body.logprobs


def options(body: Generate) -> tuple[bool, bool]:
    """(whether the stream ends with its usage, whether each chunk says it)."""
    asked = body.stream_options
    if asked is None or not (body.stream or asked.include_usage or asked.continuous_usage_stats):
        return False, False
    if not body.stream:
        raise wrong("stream_options", "is only for stream: true")
    return bool(asked.include_usage), bool(asked.include_usage and asked.continuous_usage_stats)
