"""Where requests go that begin alike: to the caches, unless the way there is longer than computing anew."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from coordinator.events import Placement
from coordinator.prefix_index import PrefixIndex
from coordinator.router import Rules, route
from coordinator.views import DecodeView, PrefillView, Snapshot, Want
from kvrelay.blocks import BlockEventKind, BlockEvents, BlockKey, BlockRun, KeyScope, block_keys
from kvrelay.requests import WorkerId

SIZE = 16
POOL = 1000


def keys_of(name: str, num_tokens: int) -> tuple[BlockKey, ...]:
    return block_keys(KeyScope("default", "f", cache_salt=name), range(num_tokens), SIZE)


class Cluster:
    """Workers as the router sees them. `place` assigns; `done` ends a request and tells what is cached by then."""

    def __init__(self, num_prefill: int, num_decode: int, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self.index = PrefixIndex()
        self.prefill = {f"p{n}": PrefillView(WorkerId(f"p{n}"), total_blocks=POOL) for n in range(num_prefill)}
        self.decode = {
            f"d{n}": DecodeView(WorkerId(f"d{n}"), f"d{n}:1", free_blocks=POOL, total_blocks=POOL)
            for n in range(num_decode)
        }
        self.next: Counter[str] = Counter()
        self.serial = 0

    def cached(self, worker: str, *keys: BlockKey) -> None:
        first = self.next[worker] + 1
        assert self.index.apply(WorkerId(worker), BlockEvents(first, (BlockRun(BlockEventKind.STORED, keys),)))
        self.next[worker] += len(keys)

    def route(self, num_tokens: int, keys: tuple[BlockKey, ...], needs_decode: bool = True) -> Placement | None:
        self.serial += 1
        snapshot = Snapshot(tuple(self.prefill.values()), tuple(self.decode.values()), self.index, self.serial)
        routed = route(snapshot, Want(num_tokens, needs_decode, last_slots=num_tokens + 8, keys=keys), self.rules)
        if routed is None:
            return None
        p, d = routed.placement.prefill, routed.placement.decode
        if p is not None:
            view, share = self.prefill[p], routed.share(p)
            tokens = view.queued_tokens + share.to_compute
            self.prefill[p] = replace(view, queued_tokens=tokens, ticketed_tokens=tokens, last_assigned=self.serial)
        if d is not None:
            v = self.decode[d]
            self.decode[d] = replace(v, sequences=v.sequences + 1, last_assigned=self.serial)
        return routed.placement

    def place(self, num_tokens: int, keys: tuple[BlockKey, ...]) -> tuple[str | None, str]:
        found = self.route(num_tokens, keys)
        assert found is not None
        assert found.decode is not None
        return found.prefill, found.decode

    def compute(self, tokens: int) -> None:
        """Each prefill worker computes so many."""
        for name, view in self.prefill.items():
            left = max(0, view.queued_tokens - tokens)
            self.prefill[name] = replace(view, queued_tokens=left, ticketed_tokens=left)

    def ended(self, decode: str) -> None:
        view = self.decode[decode]
        self.decode[decode] = replace(view, sequences=view.sequences - 1)


def test_a_prompt_goes_where_the_longest_part_of_it_is_cached() -> None:
    cluster, keys = Cluster(2, 2), keys_of("a", 320)
    cluster.cached("p1", *keys[:10])
    cluster.cached("p0", *keys[:4])
    cluster.cached("d0", *keys[:4])
    cluster.cached("d1", *keys[:20])
    assert cluster.place(330, keys) == ("p1", "d1")


def test_prefill_is_chosen_by_queue_and_uncached_tokens_together() -> None:
    cluster, keys = Cluster(2, 1), keys_of("a", 320)
    cluster.cached("p1", *keys)
    cluster.prefill["p1"] = replace(cluster.prefill["p1"], queued_tokens=319)
    assert cluster.place(330, keys)[0] == "p1"
    cluster.prefill["p1"] = replace(cluster.prefill["p1"], queued_tokens=321)
    assert cluster.place(330, keys)[0] == "p0"


def test_a_sequence_less_elsewhere_is_worth_moving_128_tokens() -> None:
    for cached, expected in ((112, "d0"), (144, "d1")):
        cluster, keys = Cluster(1, 2), keys_of("a", 320)
        cluster.cached("d1", *keys[: cached // SIZE])
        cluster.decode["d1"] = replace(cluster.decode["d1"], sequences=1)
        assert cluster.place(330, keys)[1] == expected


def test_a_prefix_that_nobody_caches_goes_to_the_emptiest_pools() -> None:
    cluster = Cluster(3, 3)
    for name, filled in (("p0", 0.5), ("p1", 0.1), ("p2", 0.3)):
        cluster.prefill[name] = replace(cluster.prefill[name], filled=filled)
    for name, free in (("d0", 400), ("d1", 600), ("d2", 900)):
        cluster.decode[name] = replace(cluster.decode[name], free_blocks=free)
    assert cluster.place(64, keys_of("new", 64)) == ("p1", "d2")


def test_among_decode_pools_in_equal_use_a_new_prefix_goes_where_less_is_cached() -> None:
    cluster = Cluster(1, 3)
    for name, cached in (("d0", 300), ("d1", 20), ("d2", 100)):
        cluster.decode[name] = replace(cluster.decode[name], cached_blocks=cached)
    assert cluster.place(64, keys_of("new", 64))[1] == "d1"


def test_of_a_prompt_that_is_cached_to_its_end_one_token_is_computed() -> None:
    cluster, keys = Cluster(1, 1), keys_of("a", 320)
    cluster.cached("p0", *keys)
    cluster.place(320, keys)
    assert cluster.prefill["p0"].queued_tokens == 1
    cluster.place(322, keys)
    assert cluster.prefill["p0"].queued_tokens == 1 + 2


def test_the_budget_of_tickets_counts_uncached_tokens_and_grows_by_cached_ones() -> None:
    cluster, keys = Cluster(1, 1), keys_of("a", 160)
    cluster.cached("p0", *keys)
    view = cluster.prefill["p0"]
    cluster.prefill["p0"] = replace(view, queued_tokens=1000, ticketed_tokens=1000)
    assert cluster.route(345, keys) is None, "185 tokens where the budget of 1,024 + 160 has room for 184"
    assert cluster.place(344, keys) == ("p0", "d0")
    assert cluster.route(25, ()) is None


def test_a_conversation_waits_for_its_own_worker_rather_than_be_computed_anew_on_an_idle_one() -> None:
    cluster, keys = Cluster(2, 1), keys_of("a", 960)
    cluster.cached("p0", *keys)
    cluster.prefill["p0"] = replace(cluster.prefill["p0"], queued_tokens=1024, ticketed_tokens=1024, step_tokens=512)
    assert cluster.place(970, keys) == ("p1", "d0")
    cluster.prefill["p0"] = replace(cluster.prefill["p0"], queued_tokens=900, ticketed_tokens=900, step_tokens=128)
    cluster.prefill["p1"] = replace(cluster.prefill["p1"], queued_tokens=0, ticketed_tokens=0)
    assert cluster.place(970, keys) == ("p0", "d0")


def test_blocks_that_running_sequences_share_need_no_room() -> None:
    cluster, keys = Cluster(1, 1), keys_of("a", 960)
    cluster.cached("d0", *keys)
    full = replace(cluster.decode["d0"], sequences=3, free_blocks=2, cached_blocks=0)
    cluster.decode["d0"] = full
    assert cluster.place(970, keys) == ("p0", "d0")
    cluster.decode["d0"] = replace(full, free_blocks=60, cached_blocks=60)
    assert cluster.route(970, keys) is None, "61 blocks, of which the 60 free ones are those that are cached"


def test_a_prompt_whose_uncached_part_is_short_is_computed_by_decode() -> None:
    rules = Rules(local_prefill_below=32)
    for num_tokens, expected in ((351, (None, "d1")), (352, ("p0", "d1"))):
        cluster, keys = Cluster(1, 2, rules), keys_of("a", 320)
        cluster.cached("d1", *keys)
        assert cluster.place(num_tokens, keys) == expected
    cluster = Cluster(1, 2, rules)
    cluster.cached("d1", *keys)
    cluster.decode["d1"] = replace(cluster.decode["d1"], max_sequences=1, sequences=1)
    assert cluster.place(340, keys) == ("p0", "d0"), "who caches it has no room"


def test_the_budget_of_prefill_does_not_hold_up_what_decode_computes() -> None:
    cluster, keys = Cluster(1, 1, Rules(local_prefill_below=32)), keys_of("a", 320)
    cluster.cached("d0", *keys)
    cluster.prefill["p0"] = replace(cluster.prefill["p0"], queued_tokens=2000, ticketed_tokens=2000)
    assert cluster.place(330, keys) == (None, "d0")
    assert cluster.route(330, keys_of("b", 320)) is None


def test_without_prefill_workers_a_hot_prefix_spreads_once_its_worker_has_a_queue() -> None:
    cluster, keys = Cluster(0, 2), keys_of("a", 320)
    cluster.cached("d0", *keys)
    assert cluster.place(330, keys) == (None, "d0")
    cluster.decode["d0"] = replace(cluster.decode["d0"], queued_tokens=400)
    assert cluster.place(330, keys) == (None, "d1")


def burst(cluster: Cluster, hot: tuple[BlockKey, ...], num_tokens: int) -> tuple[Counter[str], Counter[str]]:
    """A hundred requests at once: how many each worker gets. Steps of 512 tokens; what is computed is cached."""
    prefilled: Counter[str] = Counter()
    decoded: Counter[str] = Counter()
    steps: Counter[str] = Counter()
    while prefilled.total() < 100:
        found = cluster.route(num_tokens, hot)
        if found is not None:
            assert found.prefill is not None
            assert found.decode is not None
            prefilled[found.prefill] += 1
            decoded[found.decode] += 1
            continue
        cluster.compute(512)
        for p in prefilled:
            steps[p] += 1
            if 512 * steps[p] >= num_tokens and cluster.index.num_keys(WorkerId(p)) == 0:
                cluster.cached(p, *hot)
        for d in decoded:
            if cluster.index.num_keys(WorkerId(d)) == 0:
                cluster.cached(d, *hot)
    return prefilled, decoded


def test_a_hot_prefix_that_is_new_spreads_over_four_and_four_workers() -> None:
    for counts in burst(Cluster(4, 4), keys_of("hot", 1008), 1058):
        assert len(counts) == 4
        assert max(counts.values()) <= 40, counts


def test_a_hot_prefix_that_one_pair_caches_spreads_from_there() -> None:
    cluster, hot = Cluster(4, 4), keys_of("hot", 480)
    cluster.cached("p0", *hot)
    cluster.cached("d0", *hot)
    for counts in burst(cluster, hot, 530):
        assert len(counts) == 4
        assert max(counts.values()) <= 40, counts


def test_every_turn_of_eight_conversations_goes_where_its_history_is() -> None:
    cluster = Cluster(2, 2)
    first: dict[int, tuple[str | None, str]] = {}
    for turn in range(1, 6):
        for talk in range(8):
            tokens = 400 * turn
            keys = keys_of(f"talk{talk}", tokens)
            at = cluster.place(tokens, keys)
            assert at == first.setdefault(talk, at), f"turn {turn} of conversation {talk}"
            for worker in at:
                assert worker is not None
                cluster.cached(worker, *keys[400 * (turn - 1) // SIZE :])
            cluster.compute(400)
        for _, decode in first.values():
            cluster.ended(decode)
    assert Counter(first.values()).most_common(1)[0][1] <= 4
    assert Counter(p for p, _ in first.values()) == {"p0": 4, "p1": 4}
    assert Counter(d for _, d in first.values()) == {"d0": 4, "d1": 4}
