"""What a model needs of a machine, worked out on paper: `make_plan` and the values around it. Measures nothing."""

from kvrelay.planning.cost import DecodeStep, ModelCost, model_cost, plan_step
from kvrelay.planning.given import Load, Machine, Terms
from kvrelay.planning.long_prompt import ChunkStep, LongPrompt, plan_chunks, plan_long_prompt, stalled_steps
from kvrelay.planning.plan import Plan, Pool, batch_sizes, make_plan, plan_pool
from kvrelay.planning.workers import Workers, largest_batch, plan_workers

__all__ = [
    "ChunkStep",
    "DecodeStep",
    "Load",
    "LongPrompt",
    "Machine",
    "ModelCost",
    "Plan",
    "Pool",
    "Terms",
    "Workers",
    "batch_sizes",
    "largest_batch",
    "make_plan",
    "model_cost",
    "plan_chunks",
    "plan_long_prompt",
    "plan_pool",
    "plan_step",
    "plan_workers",
    "stalled_steps",
]
