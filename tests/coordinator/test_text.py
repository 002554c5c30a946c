"""Text and tokens: streamed pieces join to the full decode, templates, long texts off the loop."""

from __future__ import annotations

import asyncio
import functools
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from coordinator.chat import ChatTemplate, load_template
from coordinator.detokenize import Detokenizer, WindowDetokenizer
from coordinator.text import LONG_TEXT, MANY_TOKENS, MAX_WAITING, ByteCodec, HuggingFaceCodec, Tokenizing
from kvrelay.blocks import BlockKey, KeyScope, block_keys
from kvrelay.errors import InvalidArgument, NotFound, ResourceExhausted

SCOPE = KeyScope("default", "f")

SMOLLM2 = Path("~/.cache/kvrelay/models/smollm2-135m-instruct").expanduser()
needs_model = pytest.mark.skipif(not (SMOLLM2 / "tokenizer.json").exists(), reason="SmolLM2 is not pulled")
TEXTS = [
    "안녕하세요, 세계!",
    "สวัสดีชาวโลก",
    "👩‍👩‍👧‍👦 🇩🇪 naïve",
    "tabs\tand\r\nlines  .  n't ( ",
    "def f(x):\n    return x",
]


def streamed(detokenizer: Detokenizer, ids: list[int]) -> str:
    return "".join([*(detokenizer.push(i) for i in ids), detokenizer.flush()])


def test_bytes_split_over_tokens_become_one_character() -> None:
    codec = ByteCodec()
    ids = codec.encode("né👩", True)
    detokenizer = codec.detokenizer()
    assert [detokenizer.push(i) for i in ids] == ["n", "", "é", "", "", "", "👩"]
    assert detokenizer.flush() == ""


@pytest.mark.parametrize(
    ("raw", "text"),
    [(b"a\xed\xa0\x80b", "a���b"), (b"\xff!", "�!"), (b"ok\xe2\x82", "ok�")],
)
def test_bytes_that_are_no_utf8_become_replacement_characters(raw: bytes, text: str) -> None:
    assert streamed(ByteCodec().detokenizer(), list(raw)) == text
    assert ByteCodec().decode(list(raw)) == text


def test_eos_and_bos_of_the_byte_tokenizer_have_no_text_and_others_are_refused() -> None:
    detokenizer = ByteCodec().detokenizer()
    assert [detokenizer.push(i) for i in (65, 256, 257, 66)] == ["A", "", "", "B"]
    for outside in (258, 2**40, -5):
        with pytest.raises(IndexError):
            detokenizer.push(outside)


def test_random_bytes_join_to_the_full_decode() -> None:
    codec, rng = ByteCodec(), random.Random(1)
    for _ in range(300):
        ids = [rng.randrange(258) for _ in range(rng.randrange(60))]
        assert streamed(codec.detokenizer(), ids) == bytes(i for i in ids if i < 256).decode("utf-8", "replace")


@needs_model
@pytest.mark.model
def test_streamed_text_of_smollm2_is_the_librarys_full_decode() -> None:
    codec, rng = HuggingFaceCodec(SMOLLM2, 49152), random.Random(2)
    library = Tokenizer.from_file(str(SMOLLM2 / "tokenizer.json"))
    assert codec._table is not None
    short = [i for i in range(49152) if len(codec._table[i]) <= 2]
    for n in range(5000):
        pool = short if n % 2 else range(49152)
        ids = [rng.choice(pool) for _ in range(rng.randrange(1, 40))]
        assert streamed(codec.detokenizer(), ids) == library.decode(ids, skip_special_tokens=True)
    for text in TEXTS:
        ids = codec.encode(text, True)
        assert streamed(codec.detokenizer(), ids) == library.decode(ids, skip_special_tokens=True) == text


@needs_model
@pytest.mark.model
def test_the_chat_template_of_smollm2_ends_where_the_assistant_goes_on() -> None:
    codec = HuggingFaceCodec(SMOLLM2, 49152)
    assert codec.template is not None
    text = codec.template.render([{"role": "user", "content": "Hi"}])
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert codec.encode(text, False)[0] == 1


def sentencepiece_like() -> Tokenizer:
    pieces = ["<unk>", "<s>", "▁", "▁Hello", "lo", "▁wor", "ld", "!", *(f"<0x{b:02X}>" for b in range(256))]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(["<s>", "<unk>"])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def test_sentencepiece_with_byte_fallback_streams_the_librarys_decode(tmp_path: Path) -> None:
    tokenizer = sentencepiece_like()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = HuggingFaceCodec(tmp_path, tokenizer.get_vocab_size())
    byte = {b: 8 + b for b in range(256)}
    ids = [1, 3, 5, 6, *(byte[b] for b in "é👩".encode()), 2, 7, 3]
    detokenizer = codec.detokenizer()
    assert [detokenizer.push(i) for i in ids[:4]] == ["", "Hello", " wor", "ld"]
    assert streamed(codec.detokenizer(), ids) == tokenizer.decode(ids) == "Hello worldé👩 ! Hello"
    rng = random.Random(3)
    words = [1, 2, 3, 4, 5, 6, 7]
    for _ in range(500):
        ids = []
        for _ in range(rng.randrange(12)):
            ids += [byte[b] for b in rng.choice("é한👩ß").encode()] if rng.random() < 0.4 else [rng.choice(words)]
        assert streamed(codec.detokenizer(), ids) == tokenizer.decode(ids)


def test_other_decoders_stream_through_a_window(tmp_path: Path) -> None:
    vocab = {"[UNK]": 0, "hello": 1, "##ing": 2, "world": 3, ".": 4}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = HuggingFaceCodec(tmp_path, 5)
    assert isinstance(codec.detokenizer(), WindowDetokenizer)
    rng = random.Random(4)
    for _ in range(500):
        ids = [rng.randrange(1, 5) for _ in range(rng.randrange(1, 20))]
        assert streamed(codec.detokenizer(), ids) == codec.decode(ids)


async def test_a_long_text_is_encoded_in_a_thread_with_the_same_result() -> None:
    tokenizing = Tokenizing(ByteCodec())
    text = "ab" * LONG_TEXT
    assert await tokenizing.encode(text, True) == list(text.encode())
    tokenizing.close()


async def test_what_waits_for_the_thread_is_bounded() -> None:
    tokenizing = Tokenizing(ByteCodec())
    text = "ab" * LONG_TEXT
    waiting = [asyncio.ensure_future(tokenizing.encode(text, True)) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted):
        await tokenizing.encode(text, True)
    assert {len(ids) for ids in await asyncio.gather(*waiting)} == {len(text)}
    assert len(await tokenizing.encode(text, True)) == len(text)
    tokenizing.close()


def test_a_template_that_raises_is_the_clients_error() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidArgument, match="roles must alternate") as info:
        template.render([{"role": "user", "content": "x"}])
    assert info.value.field == "chat"


def test_a_template_cannot_leave_its_sandbox() -> None:
    template = ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}", {})
    with pytest.raises(InvalidArgument):
        template.render([{"role": "user", "content": "x"}])


def test_templates_come_from_the_jinja_file_or_the_config(tmp_path: Path) -> None:
    assert load_template(tmp_path) is None
    config = {"chat_template": "{{ bos_token }}{{ messages[0].content }}", "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = load_template(tmp_path)
    assert template is not None
    assert template.render([{"role": "user", "content": "x"}]) == "<s>x"
    (tmp_path / "chat_template.jinja").write_text("{{ messages | tojson }}")
    template = load_template(tmp_path)
    assert template is not None
    assert template.render([{"role": "user", "content": "<é>"}]) == '[{"role": "user", "content": "<é>"}]'


def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"tokenizer\.json"):
        HuggingFaceCodec(tmp_path, 5)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidArgument, match=r"tokenizer\.json"):
        HuggingFaceCodec(tmp_path, 5)


async def test_the_keys_of_a_long_prompt_are_made_before_the_next_text_is_encoded() -> None:
    done: list[str] = []

    class Noted(ByteCodec):
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            done.append(f"encoded {text[0]}")
            return super().encode(text, add_special_tokens)

    def keys_of(token_ids: Sequence[int]) -> tuple[BlockKey, ...]:
        done.append(f"keys {chr(token_ids[0])}")
        return block_keys(SCOPE, token_ids, 16)

    tokenizing = Tokenizing(Noted())
    texts = [letter * LONG_TEXT for letter in "abc"]
    found = await asyncio.gather(*(tokenizing.prompt(text, True, keys_of) for text in texts))
    assert done == ["encoded a", "keys a", "encoded b", "keys b", "encoded c", "keys c"]
    expected = [tuple(text.encode()) for text in texts]
    assert found == [(token_ids, block_keys(SCOPE, token_ids, 16)) for token_ids in expected]
    assert await tokenizing.prompt("x" * 40, True, None) == ((ord("x"),) * 40, ())
    tokenizing.close()


async def test_the_keys_of_tokens_wait_for_no_text() -> None:
    tokenizing = Tokenizing(ByteCodec())
    few, many = [1] * (MANY_TOKENS - 1), [1] * MANY_TOKENS
    keys_of = functools.partial(block_keys, SCOPE, block_size=16)
    text = asyncio.ensure_future(tokenizing.encode("ab" * LONG_TEXT, True))
    await asyncio.sleep(0)
    assert await tokenizing.keys(few, keys_of) == keys_of(few)
    assert await tokenizing.keys(many, keys_of) == ()
    await text
    await asyncio.sleep(0)
    assert await tokenizing.keys(many, keys_of) == keys_of(many)
    tokenizing.close()
