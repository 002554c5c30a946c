"""What a plan moves before it computes: blocks out to host memory, in again, and copies. Knows no sequences."""

from __future__ import annotations

from engine.memory import HostPool
from engine.plan import Plan


def carry_out(plan: Plan, pool: HostPool, swap: HostPool | None) -> None:
    """In the order that the plan was made for: a block that is emptied may be filled anew by a later move.

    swap: blocks of the same size; a plan that swaps needs one.
    """
    if plan.swap_out or plan.swap_in:
        assert swap is not None, f"step {plan.step_id} swaps, and there is no memory for it"
        for block_id, slot in plan.swap_out:
            swap.write(slot, 0, pool.read(block_id))
    for source, target in plan.copies:
        pool.write(target, 0, pool.read(source))
    if swap is not None:
        for slot, block_id in plan.swap_in:
            pool.write(block_id, 0, swap.read(slot))
