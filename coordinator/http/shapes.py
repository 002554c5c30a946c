"""How answers look: OpenAI's completions and chat completions, whole and in chunks. Knows neither HTTP nor requests.

A chunk is made by putting the token's text between two strings that its stream has ready: once per token of every
stream, so no object is built and no encoder runs but that of the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from typing import Any

from coordinator.http.logprobs import LogprobsOf, Parts, compact, parts_of
from coordinator.stream import FinishItem, TokenItem

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Shape:
    """before, after: what stands around the text of a chunk. role: of the first chunk; empty: there is none."""

    prefix: str
    whole: str
    chunk: str
    before: str
    after: str
    role: str = ""

    def choice(self, index: int, text: str, logprobs: str, reason: str) -> str:
        """Of a whole answer. All but the index is JSON, and so is what comes of it."""
        said = f'"text":{text}'
        if self.role:
            said = f'"message":{{"role":"{self.role}","content":{text},"refusal":null}}'
        return f'{{"index":{index},{said},"logprobs":{logprobs},"finish_reason":{reason}}}'


COMPLETION = Shape("cmpl-", "text_completion", "text_completion", '"text":', "")
CHAT = Shape("chatcmpl-", "chat.completion", "chat.completion.chunk", '"delta":{"content":', "}", "assistant")


@dataclass(frozen=True, slots=True)
class Answer:
    """What all chunks of one answer say. created: s since 1970."""

    shape: Shape
    request_id: str
    created: int
    model: str

    def head(self, kind: str) -> dict[str, Any]:
        shape = self.shape
        return {"id": shape.prefix + self.request_id, "object": kind, "created": self.created, "model": self.model}


@dataclass(slots=True)
class Usage:
    """Of one request, or of all of an answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, other: Usage) -> None:
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.cached_tokens += other.cached_tokens

    def finished(self, item: FinishItem) -> None:
        """One of its sequences has ended; what was cached is the same for all of them."""
        self.completion_tokens += item.completion_tokens
        self.cached_tokens = item.cached_tokens

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Chunks:
    """The events of one request's n choices, the first of which has index `first`.

    says_usage: the answer ends with its usage, so each chunk has a null for it; counts: or what is used so far.
    """

    def __init__(
        self,
        answer: Answer,
        first: int,
        n: int,
        usage: Usage,
        *,
        says_usage: bool,
        counts: bool,
        logprobs: LogprobsOf | None,
    ) -> None:
        shape = answer.shape
        head = compact({**answer.head(shape.chunk), "choices": []}).removesuffix("]}")
        self._plain_heads = [f'data: {head}{{"index":{first + i},' for i in range(n)]
        self._heads = [head + shape.before for head in self._plain_heads]
        self._null_usage = ',"usage":null' if says_usage else ""
        self._middle = f'{shape.after},"logprobs":'
        self._tail = f'{self._middle}null,"finish_reason":null}}]{self._null_usage}}}\n\n'
        self._role, self._usage, self._logprobs = shape.role, usage, logprobs
        self._counted = [0] * n if counts else []
        self._is_plain = logprobs is None and not counts

    def opening(self, prompt: str) -> bytes:
        """What stands before the first token of each choice: its role, or the prompt where it is to be repeated."""
        if self._role:
            delta = f'"delta":{{"role":"{self._role}","content":""}},"logprobs":null,"finish_reason":null}}]'
            return "".join(f"{head}{delta}{self._used(i)}}}\n\n" for i, head in enumerate(self._plain_heads)).encode()
        if not prompt:
            return b""
        return "".join(
            head + encode_basestring_ascii(prompt) + self._rest("null", "null", i) for i, head in enumerate(self._heads)
        ).encode()

    def token(self, item: TokenItem) -> bytes:
        """Also of a token without text: a client counts chunks."""
        if self._is_plain:
            return (self._heads[item.sequence] + encode_basestring_ascii(item.text) + self._tail).encode()
        if self._counted:
            self._counted[item.sequence] += 1
        entry = self._logprobs.entry(item) if self._logprobs is not None else None
        text = encode_basestring_ascii(item.text)
        return (self._heads[item.sequence] + text + self._rest(compact(entry), "null", item.sequence)).encode()

    def finish(self, item: FinishItem) -> bytes:
        """With the text that was held back until the end."""
        rest = self._rest("null", f'"{item.reason.value}"', item.sequence)
        if self._role and not item.text:
            head = self._plain_heads[item.sequence] + '"delta":{'
        else:
            head = self._heads[item.sequence] + encode_basestring_ascii(item.text)
        return (head + rest).encode()

    def _rest(self, logprobs: str, reason: str, sequence: int) -> str:
        return f'{self._middle}{logprobs},"finish_reason":{reason}}}]{self._used(sequence)}}}\n\n'

    def _used(self, sequence: int) -> str:
        if not self._counted:
            return self._null_usage
        prompt, done = self._usage.prompt_tokens, self._counted[sequence]
        usage = {"prompt_tokens": prompt, "completion_tokens": done, "total_tokens": prompt + done}
        return f',"usage":{compact(usage)}'


def usage_event(answer: Answer, usage: Usage) -> bytes:
    """The last chunk: no choices, but what was used."""
    chunk = {**answer.head(answer.shape.chunk), "choices": [], "usage": usage.as_dict()}
    return f"data: {compact(chunk)}\n\n".encode()


class Whole:
    """Gathers one request's n choices, the first of which has index `first`. prompt: repeated before each text."""

    def __init__(self, shape: Shape, first: int, n: int, prompt: str, logprobs: LogprobsOf | None) -> None:
        self._shape, self._first, self._logprobs = shape, first, logprobs
        self._texts = [[prompt] for _ in range(n)]
        self._parts: list[list[Parts]] = [[] for _ in range(n)]
        self._reasons = [""] * n

    def token(self, item: TokenItem) -> None:
        self._texts[item.sequence].append(item.text)
        entry = self._logprobs.entry(item) if self._logprobs is not None else None
        if entry is not None:
            self._parts[item.sequence].append(parts_of(entry))

    def finish(self, item: FinishItem) -> None:
        self._texts[item.sequence].append(item.text)
        self._reasons[item.sequence] = item.reason.value

    def choices(self) -> Iterator[str]:
        """Each as JSON."""
        for i, texts in enumerate(self._texts):
            text = encode_basestring_ascii("".join(texts))
            logprobs = "null" if self._logprobs is None else self._logprobs.join(self._parts[i])
            yield self._shape.choice(self._first + i, text, logprobs, encode_basestring_ascii(self._reasons[i]))


def whole_answer(answer: Answer, wholes: Iterable[Whole], usage: Usage) -> Iterator[str]:
    """Its JSON in pieces, each of which is short work."""
    before = compact({**answer.head(answer.shape.whole), "choices": []}).removesuffix("]}")
    for whole in wholes:
        for choice in whole.choices():
            yield before + choice
            before = ","
    yield f'],"usage":{compact(usage.as_dict())}}}'
