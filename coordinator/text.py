"""Text <-> token ids and chat templates, for Hugging Face tokenizers and for plain bytes. Knows no requests, no wires.

Makes the keys of blocks too, as both want a thread for what is long. Uses the `tokenizers` library and jinja2 alone: a
coordinator does not need transformers.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

from tokenizers import Tokenizer

from coordinator.chat import ChatTemplate, load_template
from coordinator.compiling import Compiling
from coordinator.constraints import Constraint
from coordinator.detokenize import ByteDetokenizer, Detokenizer, WindowDetokenizer
from coordinator.token_bytes import byte_table, longest_token, special_ids, without
from kvrelay.blocks import BlockKey
from kvrelay.errors import InvalidArgument, NotFound, ResourceExhausted

LONG_TEXT = 2048
"""Characters from which on a text is encoded in a thread, about 3 ms: every stream waits while the loop stands."""
MANY_TOKENS = 8192
"""Tokens from which on the keys of their blocks are made in a thread, about 1.6 ms."""
ENCODED_AT_ONCE = 65536
"""Bytes that become tokens in one go, about 1 ms."""
IDS_AT_ONCE = 65_536
"""Token ids that are put into an answer in one go, about 5 ms: other threads run between such pieces."""
MAX_WAITING = 128
BYTE_VOCAB = 258
BYTE_EOS = 256
BYTE_BOS = 257


T = TypeVar("T")
P = ParamSpec("P")
Keys = tuple[BlockKey, ...]
KeysOf = Callable[[Sequence[int]], Keys]
"""The keys of a prompt's full blocks, from its tokens."""


class TextCodec(Protocol):
    """One model's tokenizer. Ids given to `decode` must lie in the vocabulary.

    skip_special_tokens: special tokens have no text; else their names are their text.
    """

    vocab_size: int
    template: ChatTemplate | None
    longest_token: int
    """Most characters of text that one token can stand for; 0 where that is not known."""
    directory: str
    """Where its tokenizer lies; empty: tokens are bytes."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer: ...

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, alone; a special token for its name. IndexError outside the vocabulary."""
        ...


class ByteCodec:
    """For executors without a model: ids 0..255 are bytes, 256 is EOS, 257 is BOS and is never added."""

    vocab_size = BYTE_VOCAB
    template: ChatTemplate | None = None
    longest_token = 1
    directory = ""

    def __init__(self) -> None:
        self._whole = [*(bytes([i]) for i in range(256)), b"<eos>", b"<bos>"]
        self._table = without(self._whole, frozenset({BYTE_EOS, BYTE_BOS}))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """In pieces: other threads run between them, as they do while a real tokenizer is at work."""
        raw, token_ids = text.encode("utf-8", "replace"), list[int]()
        for start in range(0, len(raw), ENCODED_AT_ONCE):
            token_ids.extend(raw[start : start + ENCODED_AT_ONCE])
        return token_ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        table = self._table if skip_special_tokens else self._whole
        return b"".join(table[i] for i in token_ids).decode("utf-8", "replace")

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        return ByteDetokenizer(self._table if skip_special_tokens else self._whole)

    def token_bytes(self, token_id: int) -> bytes:
        return _nth(self._whole, token_id)


class HuggingFaceCodec:
    """A tokenizer.json with the chat template beside it."""

    def __init__(self, directory: str | Path, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.directory = str(directory)
        self._tokenizer = _load(Path(directory) / "tokenizer.json")
        self.template = load_template(Path(directory))
        self._whole, self._strip_first_space = byte_table(self._tokenizer, vocab_size)
        self._table = None if self._whole is None else without(self._whole, special_ids(self._tokenizer))
        self.longest_token = longest_token(self._tokenizer, self._whole)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """As a batch of one: unlike `encode`, the library's `encode_batch` lets other threads run meanwhile."""
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """What `detokenizer` streams, in one piece."""
        detokenizer = self.detokenizer(skip_special_tokens)
        pieces = [detokenizer.push(i) for i in token_ids]
        return "".join(pieces) + detokenizer.flush()

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        table = self._table if skip_special_tokens else self._whole
        if table is not None:
            return ByteDetokenizer(table, self._strip_first_space)
        return WindowDetokenizer(
            lambda ids: self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens), self.vocab_size
        )

    def token_bytes(self, token_id: int) -> bytes:
        if self._whole is not None:
            return _nth(self._whole, token_id)
        if not 0 <= token_id < self.vocab_size:
            raise IndexError(token_id)
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()


def _nth(table: list[bytes], token_id: int) -> bytes:
    if token_id < 0:
        raise IndexError(token_id)
    return table[token_id]


class Tokenizing:
    """Owns the one thread for long texts and prompts, and what compiles grammars; `close` ends them.

    What waits for the thread is bounded.
    """

    def __init__(self, codec: TextCodec) -> None:
        self.codec = codec
        self._compiling = Compiling(codec.directory)
        self._waiting = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """ResourceExhausted when too many long texts wait already."""
        if len(text) < LONG_TEXT:
            return self.codec.encode(text, add_special_tokens)
        return await self._in_thread(self.codec.encode, text, add_special_tokens)

    async def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if len(token_ids) < LONG_TEXT:
            return self.codec.decode(token_ids, skip_special_tokens)
        return await self._in_thread(self.codec.decode, token_ids, skip_special_tokens)

    async def aside(self, size: int, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """What work says, in the thread if it is long. size: how many characters or tokens it has to do with."""
        if size < LONG_TEXT:
            return work(*arguments, **named)
        return await self._in_thread(functools.partial(work, *arguments, **named))

    async def prompt(
        self, text: str, add_special_tokens: bool, keys_of: KeysOf | None, most: int | None = None
    ) -> tuple[tuple[int, ...], Keys]:
        """(tokens, their keys) in one job: with two, each prompt would wait for all texts that came meanwhile.

        most: only the last so many tokens are used. ResourceExhausted as in `encode`.
        """
        return await self.rendered(lambda: text, len(text), add_special_tokens, keys_of, most)

    async def rendered(
        self,
        render: Callable[[], str],
        size: int,
        add_special_tokens: bool,
        keys_of: KeysOf | None,
        most: int | None = None,
    ) -> tuple[tuple[int, ...], Keys]:
        """As `prompt`, of a text that is still to be made. size: of what it is made of, in characters."""
        if size < LONG_TEXT:
            return _prompt(self.codec, render, add_special_tokens, keys_of, most)
        return await self._in_thread(_prompt, self.codec, render, add_special_tokens, keys_of, most)

    async def keys(self, token_ids: Sequence[int], keys_of: KeysOf) -> Keys:
        """Of a prompt that came as tokens. None of a long one while the thread is busy, as nothing depends on them."""
        if len(token_ids) < MANY_TOKENS:
            return keys_of(token_ids)
        return () if self._waiting else await self._in_thread(keys_of, token_ids)

    async def grammar(self, constraint: Constraint) -> str:
        """What Sampling.grammar takes. InvalidArgument names the field; Unimplemented: not with this tokenizer.

        Compiled beside this process, as what a client writes may end the one that reads it; the first takes a second.
        """
        return await self._compiling.grammar(constraint)

    async def _in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        if self._waiting >= MAX_WAITING:
            raise ResourceExhausted(f"{MAX_WAITING} long texts wait to be tokenized", retry_after_s=1.0)
        self._waiting += 1
        job: list[object] = [work, *arguments]
        ended = asyncio.get_running_loop().run_in_executor(self._thread, _run, job)
        ended.add_done_callback(self._one_less)
        try:
            # A job that were cancelled would stay in the thread's queue, with its text, and no longer be counted.
            result: T = await asyncio.shield(ended)
            return result
        finally:
            job.clear()

    def _one_less(self, _: object) -> None:
        self._waiting -= 1

    def close(self) -> None:
        self._compiling.close()
        self._thread.shutdown(wait=False, cancel_futures=True)


def _prompt(
    codec: TextCodec, render: Callable[[], str], add_special_tokens: bool, keys_of: KeysOf | None, most: int | None
) -> tuple[tuple[int, ...], Keys]:
    encoded = codec.encode(render(), add_special_tokens)
    token_ids = tuple(encoded if most is None else encoded[-most:])
    return token_ids, keys_of(token_ids) if keys_of is not None else ()


def _run(job: list[Any]) -> Any:
    """The call that a job holds; nothing if its caller has gone and taken it back."""
    if job:
        work, *arguments = job
        return work(*arguments)
    return None


def _load(path: Path) -> Tokenizer:
    if not path.is_file():
        raise NotFound(f"{path}: no such file", field="model")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for a file it cannot read
        raise InvalidArgument(f"{path}: not a tokenizer: {error}", field="model") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
