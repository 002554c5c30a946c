"""A cached prefix saves work and changes nothing else: every answer is that of the sequence alone, without a cache."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
from specs import alone, cached_tokens, constant, hash_engine, key, spec

from engine.block_pool import BlockPool
from engine.budgets import Budgets
from engine.events import Event, Sampled
from engine.local import LocalEngine
from engine.scheduler import Scheduler
from kvrelay.blocks import BlockCounts, BlockEventKind, BlockKey, KeyChain
from kvrelay.requests import Sampling, SequenceSpec

B = 16
BEGIN = tuple((37 * i + 5) % 251 for i in range(20 * B))


def tokens_of(seed: object, length: int) -> tuple[int, ...]:
    draw = random.Random(f"{seed}")
    return tuple(draw.randrange(256) for _ in range(length))


@pytest.fixture
def cached() -> Iterator[tuple[LocalEngine, BlockPool]]:
    engine, pool = hash_engine(512, B, cache=True)
    yield engine, pool
    engine.executor.close()


def run(engine: LocalEngine, specs: Iterable[SequenceSpec]) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """What each said, and how much of each prompt was cached."""
    events: list[Event] = list(engine.stream(specs))
    said: dict[str, list[int]] = {}
    for event in events:
        if isinstance(event, Sampled):
            said.setdefault(event.key.request_id, []).append(event.token_id)
    return {name: tuple(tokens) for name, tokens in said.items()}, cached_tokens(events)


def test_a_prompt_of_6_blocks_and_5_tokens_says_the_same_8_times_alone_and_between_22_others(
    cached: tuple[LocalEngine, BlockPool],
) -> None:
    engine, pool = cached
    prompt = BEGIN[: 6 * B + 5]
    expected = alone(spec("x", prompt, 20))
    for number in range(4):
        said, hits = run(engine, [spec(f"x{number}", prompt, 20)])
        assert said == {f"x{number}": expected}
        assert hits == ({f"x{number}": 6 * B} if number else {})
    others = [spec(f"o{i}", tokens_of(i, 5 + 9 * i), 10 + i) for i in range(22)]
    mixed = others + [spec(f"x{number}", prompt, 20) for number in range(4, 8)]
    random.Random(3).shuffle(mixed)
    said, hits = run(engine, mixed)
    assert said == {one.key.request_id: alone(one) for one in mixed}
    assert {said[f"x{number}"] for number in range(4, 8)} == {expected}
    assert hits == {f"x{number}": 6 * B for number in range(4, 8)}
    assert pool.counts().held == 0


@pytest.mark.parametrize("mix", range(50))
def test_batches_of_hits_misses_and_partial_hits_say_what_each_says_alone(mix: int) -> None:
    draw = random.Random(f"mix {mix}")
    budgets = Budgets(draw.choice([24, 64, 512]), max_prefill_tokens=draw.choice([None, 16]))
    engine, pool = hash_engine(draw.choice([60, 256]), B, budgets, cache=True)
    known = [tokens_of((mix, i), draw.randint(2 * B, 6 * B)) for i in range(3)]
    run(engine, [spec(f"k{i}", tokens, 4) for i, tokens in enumerate(known)])
    batch, expected_hits = [], {}
    for number, kind in enumerate(["hit", "miss", "hit", "part", *draw.choices(["hit", "miss", "part"], k=4)]):
        name, begin = f"{kind}{number}", draw.choice(known)
        own = tokens_of((mix, number), draw.randint(1, 3 * B))
        full = len(begin) // B if kind == "hit" else draw.randint(1, len(begin) // B - 1) if kind == "part" else 0
        if full:
            expected_hits[name] = full * B
        batch.append(spec(name, (*begin[: full * B], 255 - begin[full * B % len(begin)], *own), 12, Sampling(seed=mix)))
    said, hits = run(engine, batch)
    assert said == {one.key.request_id: alone(one) for one in batch}
    if pool.num_blocks == 256:  # nothing was evicted
        assert hits == expected_hits
    pool.check_integrity()
    assert pool.counts().held == 0
    engine.executor.close()


@pytest.mark.parametrize("k", range(1, 9))
def test_a_prompt_of_whole_blocks_computes_its_last_token_again_and_one_token_more_hits_all(
    cached: tuple[LocalEngine, BlockPool], k: int
) -> None:
    engine, pool = cached
    prompt = BEGIN[: k * B]
    said, hits = run(engine, [spec("first", prompt, 5)])
    assert hits == {}
    again, hits = run(engine, [spec("second", prompt, 5)])
    assert hits == {"second": k * B - 1}
    assert again["second"] == said["first"] == alone(spec("x", prompt, 5))
    longer = (*prompt, 7)
    said, hits = run(engine, [spec("third", longer, 5)])
    assert hits == {"third": k * B}
    assert said["third"] == alone(spec("x", longer, 5))
    assert pool.counts().held == 0


def test_a_whole_cached_prompt_leaves_the_cached_block_as_it_is(cached: tuple[LocalEngine, BlockPool]) -> None:
    """Its last token is computed in a copy: the block may serve others at the same time."""
    engine, _ = cached
    prompt = BEGIN[: 2 * B]
    run(engine, [spec("first", prompt, 5)])
    engine.add(spec("second", prompt, 5))
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert plan.copies == ((1, plan.slices[0].table.block_ids[1]),)
    assert plan.slices[0].table.block_ids[0] == 0
    assert (plan.slices[0].start, plan.num_tokens) == (2 * B - 1, 1)
    engine.scheduler.apply(plan, engine.executor.run(plan))
    assert engine.scheduler.room.num_copied == 1


def test_with_no_block_left_for_a_copy_the_last_block_is_computed_anew() -> None:
    engine, _pool = hash_engine(2, 4, cache=True)
    prompt = BEGIN[:8]
    first, _ = run(engine, [spec("first", prompt, 1)])
    second, hits = run(engine, [spec("second", prompt, 1)])
    assert hits == {"second": 4}
    assert second["second"] == first["first"]
    engine.executor.close()


def test_the_smallest_prefix_that_can_be_cached_is_one_block(cached: tuple[LocalEngine, BlockPool]) -> None:
    engine, pool = cached
    for name, length, expected in (("short", B - 1, None), ("block", B, B - 1)):
        prompt = tokens_of(name, length)
        run(engine, [spec(name, prompt, 1)])
        _, hits = run(engine, [spec(f"{name} again", prompt, 1)])
        assert hits.get(f"{name} again") == expected
    assert pool.counts().cached == 1


def test_the_next_turn_of_a_conversation_hits_what_was_generated(cached: tuple[LocalEngine, BlockPool]) -> None:
    """The last token of an answer is never computed: 40 + 30 - 1 tokens are, so 4 blocks of the 5 are full."""
    engine, _ = cached
    said, _ = run(engine, [spec("turn1", BEGIN[:40], 30)])
    question = (*BEGIN[:40], *said["turn1"], 1, 2, 3)
    again, hits = run(engine, [spec("turn2", question, 5)])
    assert hits == {"turn2": 4 * B}
    assert again["turn2"] == alone(spec("x", question, 5))


def test_a_request_that_may_not_use_the_cache_neither_finds_nor_leaves_anything(
    cached: tuple[LocalEngine, BlockPool],
) -> None:
    engine, pool = cached
    off = replace(spec("off", BEGIN[:64], 20), prefix_cache=False)
    assert run(engine, [off])[1] == {}
    assert pool.counts() == BlockCounts(total=512, free=512)
    run(engine, [spec("on", BEGIN[:64], 20)])
    _, hits = run(engine, [replace(off, key=key("off again"))])
    assert hits == {}


def test_300_requests_with_one_prefix_and_tails_of_their_own_pin_nothing_afterwards() -> None:
    engine, pool = hash_engine(24, B, cache=True)
    for number in range(300):
        prompt = (*BEGIN[: 3 * B], *tokens_of(number, 1 + number % 40))
        said, hits = run(engine, [spec(f"r{number}", prompt, 4)])
        assert said[f"r{number}"] == alone(spec("x", prompt, 4))
        assert hits == ({f"r{number}": 3 * B} if number else {})
        counts = pool.counts()
        assert (counts.held, counts.free + counts.cached) == (0, 24)
    engine.executor.close()


def test_5_000_prompts_are_exact_under_keys_of_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are compared on a hit, so that a key which two contents share costs time and nothing else."""
    whole = KeyChain.extend
    seen: set[tuple[int, ...]] = set()

    def short(self: KeyChain, token_ids: tuple[int, ...]) -> list[BlockKey]:
        seen.add(tuple(token_ids))
        return [BlockKey(block_key.digest[:1]) for block_key in whole(self, token_ids)]

    monkeypatch.setattr(KeyChain, "extend", short)
    engine, pool = hash_engine(300, 4, cache=True)
    reference, _ = hash_engine(300, 4)
    draw = random.Random(8)
    begins = [tokens_of(("begin", i), 16) for i in range(12)]
    num_hits = 0
    for first in range(0, 5_000, 10):
        batch = []
        for number in range(first, first + 10):
            begin = draw.choice(begins)[: draw.randint(0, 16)]
            batch.append(spec(f"r{number}", (*begin, *tokens_of(number, draw.randint(1, 12))), draw.randint(1, 6)))
        said, hits = run(engine, batch)
        num_hits += len(hits)
        assert said == {k.request_id: tokens for k, tokens in reference.generate(batch).items()}
    assert pool.cache is not None
    assert len(pool.cache) <= 256 < len(seen), "too few contents for any two to share a key"
    assert num_hits > 500
    pool.check_integrity()
    engine.executor.close()
    reference.executor.close()


class Strangers:
    """Two requests after another on one pool, no model behind: whether the second found what the first left."""

    def __init__(self) -> None:
        self.pool = BlockPool(64, cache=True)
        self.scheduler = Scheduler(self.pool, 2, Budgets())

    def share(self, a: SequenceSpec, b: SequenceSpec) -> bool:
        self.pool.clear_cache()
        found = []
        for one in (replace(a, key=key("a")), replace(b, key=key("b"))):
            self.scheduler.add(one)
            plan = self.scheduler.schedule()
            assert plan is not None
            found.append(bool(cached_tokens(self.scheduler.apply(plan, constant(plan)))))
            assert self.scheduler.schedule() is None
        assert not found[0]
        return found[1]


TOKENS = spec("x", (0x61, 0x62, 0x63, 0x64, 0x65), 1)


def whose(tenant: str, salt: str, tokens: tuple[int, ...] = TOKENS.token_ids) -> SequenceSpec:
    return replace(TOKENS, tenant=tenant, cache_salt=salt, token_ids=tokens, num_prompt_tokens=len(tokens))


def test_tenants_whose_names_and_salts_join_to_the_same_text_share_nothing() -> None:
    strangers = Strangers()
    assert not strangers.share(whose("org_1", "2345"), whose("org_12345", ""))
    assert not strangers.share(whose("a", "s"), whose("b", "s")), "a client may set the salt of another, not the tenant"
    assert strangers.share(whose("org_1", "2345"), whose("org_1", "2345"))


def test_10_000_adversarial_pairs_of_requests_never_share_a_block() -> None:
    """Texts are split, framed, padded and moved between tenant, salt and tokens in ways that a joined text confuses."""
    strangers, draw = Strangers(), random.Random(64)
    marks = ["", "\0", "\x01", "/", ":", "|", "5", "\x04\0\0\0\0\0\0\0", "default", "é", "e\u0301", " ", "abcd"]
    for _ in range(10_000):
        text = "".join(draw.choices(marks, k=draw.randint(2, 5))) or "x"
        i, j = draw.randint(0, len(text)), draw.randint(0, len(text))
        a = (text[:i], text[i:])
        b = draw.choice([(text[:j], text[j:]), (text[i:], text[:i]), (text, ""), ("", text), (a[0] + "\0", a[1])])
        if a == b:
            b = (b[0] + draw.choice(marks[1:]), b[1])
        moved = tuple(ord(c) for c in text) + TOKENS.token_ids
        tokens = draw.choice([TOKENS.token_ids, TOKENS.token_ids, moved])
        assert not strangers.share(whose(*a), whose(*b, tokens)), f"{a} and {b}"
    strangers.pool.check_integrity()


def test_other_weights_under_the_same_name_hit_nothing() -> None:
    pool = BlockPool(8, cache=True)
    for fingerprint, expected in (("weights 1", {}), ("weights 2", {}), ("weights 1", {"a": 32})):
        scheduler = Scheduler(pool, B, Budgets(), fingerprint=fingerprint)
        scheduler.add(spec("a", BEGIN[:33], 1))
        plan = scheduler.schedule()
        assert plan is not None
        assert cached_tokens(scheduler.apply(plan, constant(plan))) == expected
        assert scheduler.schedule() is None


def test_events_replayed_tell_what_is_cached_after_any_workload() -> None:
    for seed in range(60):
        draw = random.Random(seed)
        engine, pool = hash_engine(draw.randint(6, 30), 4, cache=True)
        assert pool.cache is not None
        seen: set[BlockKey] = set()
        for number in range(12):
            prompt = (*BEGIN[: draw.randint(0, 10)], *tokens_of(number % 3, draw.randint(1, 8)))
            engine.add(spec(f"r{number}", prompt, draw.randint(1, 5)))
            for _ in range(draw.randint(0, 4)):
                engine.step()
            for events in pool.cache.take_events():
                if events.kind is BlockEventKind.STORED:
                    assert not seen & set(events.keys)
                    seen |= set(events.keys)
                else:
                    assert seen >= set(events.keys)
                    seen -= set(events.keys)
            assert seen == set(pool.cache.keys())
        engine.executor.close()
