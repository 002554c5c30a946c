"""From a plan to the tensors of a step."""

import torch
from support.steps import part, plan

from engine.tensors import step_batch


def test_a_mixed_step_becomes_one_flat_batch() -> None:
    batch = step_batch(
        plan(
            part("decoding", [7], start=5, block_ids=[9, 3, 8], block_size=4),
            part("chunk", [11, 12, 13], start=3, block_ids=[5, 6], block_size=4, samples=False),
            part("whole", [21, 22], start=0, block_ids=[2], block_size=4),
        )
    )
    assert batch.num_tokens == 6
    assert batch.token_ids.tolist() == [7, 11, 12, 13, 21, 22]
    assert batch.positions.tolist() == [5, 3, 4, 5, 0, 1]
    assert batch.slot_blocks.tolist() == [3, 5, 6, 6, 2, 2]
    assert batch.slot_offsets.tolist() == [1, 3, 0, 1, 0, 1]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 4, 6]
    assert batch.context_lens.tolist() == [6, 6, 2]
    # Block 8 is there for tokens to come: no row of this step reads or writes it.
    assert batch.block_tables.tolist() == [[9, 3], [5, 6], [2, 0]]
    assert batch.sample_rows.tolist() == [0, 5]


def test_every_tensor_has_the_dtype_kernels_expect() -> None:
    batch = step_batch(plan(part("a", [1, 2], start=0, block_ids=[0])))
    int64 = {"token_ids", "sample_rows"}
    for name in batch.__slots__:
        tensor = getattr(batch, name)
        assert tensor.dtype is (torch.int64 if name in int64 else torch.int32), name
        assert tensor.is_contiguous(), name


def test_a_step_in_which_nothing_samples_has_no_sample_rows() -> None:
    batch = step_batch(plan(part("a", [1, 2], start=0, block_ids=[0], samples=False)))
    assert batch.sample_rows.tolist() == []
    assert batch.sample_rows.dtype is torch.int64
