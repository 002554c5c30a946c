"""Worked figures of batching, chunks and hand-off, and what a plan makes of them: Llama 3 8B on an H100."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.batching import Batching, continuous_batching, spread_lengths, static_batching
from kvrelay.errors import InvalidArgument
from kvrelay.models.presets import PRESETS
from kvrelay.planning import (
    Load,
    Machine,
    Plan,
    Terms,
    largest_batch,
    make_plan,
    model_cost,
    plan_chunks,
    plan_step,
    stalled_steps,
)
from kvrelay.sizing import Chunk, Fit, chunks

LLAMA = PRESETS["llama-3-8b"]
COST = model_cost(LLAMA, "bfloat16")
H100 = Machine(80 * 10**9, 3.35e12, 990e12, 50e9)
LOAD = Load(prompt_tokens=800, output_tokens=400, rate=10.0)
TERMS = Terms(long_prompt=32_768)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(LLAMA, H100, LOAD, TERMS)


def test_a_static_batch_of_10_50_200_and_2000_tokens_is_28_percent_useful() -> None:
    done = static_batching([10, 50, 200, 2000], rows=4)
    assert done == Batching(steps=2000, starts=(1, 1, 1, 1), useful=2260 / 8000)
    assert round(100 * done.useful, 2) == 28.25
    assert round(1 / done.useful, 1) == 3.5


def test_eight_requests_in_four_rows_take_14_steps_statically_and_12_continuously() -> None:
    lengths = [2, 5, 3, 8, 4, 3, 5, 6]
    static, continuous = static_batching(lengths, 4), continuous_batching(lengths, 4)
    assert (static.steps, round(100 * static.useful), static.starts[4]) == (14, 64, 9)
    assert (continuous.steps, round(100 * continuous.useful), continuous.starts[4]) == (12, 75, 3)


def test_spread_lengths_keep_their_mean_and_reach_far_beyond_it() -> None:
    lengths = spread_lengths(400, 1024)
    assert len(lengths) == 1024
    assert round(sum(lengths) / 1024) == 400
    assert (min(lengths), max(lengths)) == (1, 3050)
    assert spread_lengths(1, 1) == (1,)


def test_the_shape_of_llama_3_8b_gives_its_weights_and_its_kv() -> None:
    assert COST.num_params == 8_030_261_248
    assert round(COST.weight_bytes / 1e9, 2) == 16.06
    assert round(COST.layer_params / 1e9, 2) == 6.98
    assert COST.token_bytes == 131_072


def test_tied_embeddings_and_biases_count_once() -> None:
    tied = model_cost(replace(LLAMA, tie_embeddings=True), "bfloat16")
    assert COST.num_params - tied.num_params == 128_256 * 4_096
    biased = model_cost(replace(LLAMA, attention_bias=True, mlp_bias=True), "bfloat16")
    assert biased.num_params - COST.num_params == 32 * (4_096 + 2 * 1_024 + 4_096 + 2 * 14_336 + 4_096)
    assert model_cost(LLAMA, "float32").token_bytes == 262_144


def test_a_prompt_of_32_768_tokens_stalls_32_streams_for_125_to_250_steps(plan: Plan) -> None:
    long = plan.long_prompt
    assert f"{long.cost.linear:.3e}" == "4.574e+14"
    assert f"{long.cost.attention:.3e}" == "2.815e+14"
    assert f"{long.cost.total:.2e}" == "7.39e+14"
    assert (round(long.seconds, 2), round(long.real_s, 1)) == (0.75, 1.5)
    assert round(stalled_steps(0.75, 0.006)) == 125
    assert round(stalled_steps(1.5, 0.006)) == 250
    assert round(long.stalled_steps, 1) == 123.4
    assert round(long.real_stalled_steps, 1) == 246.9


def test_chunks_of_2_048_are_16_steps_of_30_to_63_ms(plan: Plan) -> None:
    cut = plan.long_prompt.chunks
    assert len(cut) == 16
    assert {f"{chunk.linear:.2e}" for chunk in cut} == {"2.86e+13"}
    assert f"{cut[0].linear + cut[0].attention:.2e}" == "2.97e+13"
    assert f"{cut[-1].linear + cut[-1].attention:.2e}" == "6.27e+13"
    assert [round(chunk.seconds * 1000) for chunk in (cut[0], cut[-1])] == [30, 63]
    assert sum(chunk.linear + chunk.attention for chunk in cut) == plan.long_prompt.cost.total


def test_32_decode_rows_add_1_6_percent_of_rows_or_make_it_17_steps(plan: Plan) -> None:
    assert round(100 * 32 / 2_048, 1) == 1.6
    mixed = plan.long_prompt.mixed
    assert len(mixed) == 17
    assert (mixed[0].num_tokens, mixed[-1].past_tokens, mixed[-1].num_tokens) == (2_016, 32_256, 512)
    assert chunks(100, 64, 32) == (Chunk(0, 32), Chunk(32, 32), Chunk(64, 32), Chunk(96, 4))
    with pytest.raises(ValueError, match="leave nothing"):
        chunks(100, 32, 32)


def test_a_step_with_a_small_chunk_lasts_as_long_as_reading_the_weights_and_all_kv() -> None:
    (step,) = plan_chunks(COST, H100, num_tokens=16, step_tokens=64, decode_rows=32, context_tokens=1_000)
    assert step.step_s == (COST.weight_bytes + 32_016 * COST.token_bytes) / 3.35e12
    assert step.seconds < step.step_s


def test_the_hand_off_of_32_768_tokens_is_2_048_blocks_and_86_ms(plan: Plan) -> None:
    long = plan.long_prompt
    assert (long.handoff_blocks, round(long.handoff_bytes / 1e9, 2)) == (2_048, 4.29)
    assert round(long.handoff_s * 1000) == 86
    fast = make_plan(LLAMA, replace(H100, network_bytes_per_s=350e9), LOAD, TERMS)
    assert round(fast.long_prompt.handoff_s * 1000) == 12


def test_the_pool_and_what_fits_are_those_of_the_worked_figures(plan: Plan) -> None:
    pool = plan.pool
    assert (pool.num_tokens, pool.num_blocks, pool.mean_tokens) == (411_525, 25_720, 1_000)
    assert pool.paged == Fit(408, 0.0075)
    assert pool.preallocated.num_requests == 50


def test_steps_are_shown_up_to_what_fits_with_the_worked_bounds(plan: Plan) -> None:
    assert [step.num_sequences for step in plan.steps] == [1, 8, 32, 50, 128, 408]
    shown = {step.num_sequences: (round(step.seconds * 1000, 2), round(step.tokens_per_s)) for step in plan.steps}
    assert shown[32][0] == 6.05
    assert shown[50] == (6.75, 7_407)
    assert shown[128][0] == 9.80
    assert shown[408] == (20.76, 19_655)
    assert {step.bound_by for step in plan.steps} == {"memory"}


def test_a_machine_that_computes_slowly_is_bound_by_it() -> None:
    step = plan_step(COST, replace(H100, flops_per_s=1e12), 32, 1_000)
    assert step.bound_by == "compute"
    assert step.seconds == step.compute_s == 32 * (2 * (COST.layer_params + COST.head_params) + 524_288_000) / 1e12


def test_ten_requests_a_second_need_these_workers(plan: Plan) -> None:
    workers = plan.workers
    prompt = 2 * COST.layer_params * 800 + 2 * 4_096 * 32 * 800**2
    assert workers.prompt_s == prompt / 990e12 / 0.5
    assert round(workers.prefill, 3) == 0.229
    assert (workers.num_prefill, workers.num_decode, workers.full_batch) == (1, 1, 256)
    full_s = (COST.weight_bytes + 256_000 * COST.token_bytes) / 3.35e12 / 0.5
    assert workers.decode == pytest.approx(10 * 400 * full_s / 256)
    assert workers.prefill_per_decode == workers.prefill / workers.decode
    assert workers.handoff_s == 50 * 2_097_152 / 50e9
    assert workers.network == pytest.approx(10 * workers.handoff_s)


def test_the_batch_that_settles_is_the_rate_times_the_time_of_an_answer(plan: Plan) -> None:
    workers = plan.workers
    assert workers.batch == pytest.approx(10 * 400 * workers.tbt_s)
    assert round(workers.batch, 1) == 55.8


def test_more_load_than_one_worker_takes_is_spread_over_several() -> None:
    workers = make_plan(LLAMA, H100, replace(LOAD, rate=100.0), TERMS).workers
    assert (workers.num_prefill, workers.num_decode) == (3, 5)
    assert workers.batch < workers.full_batch


def test_the_longest_step_wanted_bounds_the_batch() -> None:
    terms = replace(TERMS, tbt_s=0.0125)
    most = largest_batch(COST, H100, LOAD, terms, 408)
    assert most == 37
    inside, outside = (plan_step(COST, H100, n, 1_000).seconds / 0.5 for n in (most, most + 1))
    assert inside <= 0.0125 < outside


def test_a_longest_step_that_not_even_one_sequence_keeps_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"a step of one sequence alone takes 9\.67 ms") as refused:
        make_plan(LLAMA, H100, LOAD, replace(TERMS, tbt_s=0.005))
    assert refused.value.field == "--tbt-ms"


def test_a_model_that_does_not_fit_is_refused_with_the_figures() -> None:
    with pytest.raises(InvalidArgument, match=r"72 GB are usable, weights and reserve take 143\.1 GB") as refused:
        make_plan(PRESETS["llama-3-70b"], H100, LOAD, TERMS)
    assert refused.value.field == "--memory-gb"


def test_requests_longer_than_the_model_are_refused_and_a_longer_long_prompt_is_noted(plan: Plan) -> None:
    assert plan.notes == ("a prompt of 32768 tokens is longer than the model's 8192 positions",)
    with pytest.raises(InvalidArgument, match="make 9000 tokens, the model has 8192") as refused:
        make_plan(LLAMA, H100, Load(8_000, 1_000, 1.0), TERMS)
    assert refused.value.field == "--prompt-tokens"


def test_decode_rows_that_fill_the_step_are_refused() -> None:
    with pytest.raises(InvalidArgument) as refused:
        make_plan(LLAMA, H100, LOAD, replace(TERMS, step_tokens=32))
    assert refused.value.field == "--decode-sequences"
