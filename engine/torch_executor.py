"""Runs plans on a real model: tensors of the step, forward pass, sampling. Knows neither scheduling nor sequences.

Everything, the constructor too, is called from one thread, the engine's: torch keeps thread counts per thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog
import torch

from engine.attention.base import AttentionBackend
from engine.attention.cpu import cpu_attention
from engine.attention.reference import ReferenceAttention
from engine.linear import activation_dtype, backend_name, make_head, make_linear
from engine.llama import Backends, LlamaModel
from engine.memory import HostPool
from engine.moves import carry_out
from engine.plan import Phases, Plan, Result
from engine.rope import rope_table
from engine.sampler import Masks, draws_of, sample
from engine.tensors import StepBatch, step_batch
from engine.weights import Checkpoint
from kvrelay.blocks import KVLayout
from kvrelay.errors import Internal, InvalidArgument
from kvrelay.models.config import ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ATTENTIONS = ("auto", "cpu", "reference")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """How to run a model. dtype is that of weights and KV; num_blocks and swap_blocks are sizes of pools."""

    dtype: str = "bfloat16"
    num_blocks: int = 1024
    block_size: int = 16
    threads: int = 1
    attention: str = "auto"
    swap_blocks: int = 0

    def __post_init__(self) -> None:
        for field, known in (("dtype", tuple(DTYPES)), ("attention", ATTENTIONS)):
            if getattr(self, field) not in known:
                raise InvalidArgument(
                    f"{field} must be one of {', '.join(known)}, not {getattr(self, field)!r}", field=field
                )
        for field in ("num_blocks", "block_size", "threads"):
            if getattr(self, field) < 1:
                raise InvalidArgument(f"{field} must be at least 1, not {getattr(self, field)}", field=field)


def model_layout(config: ModelConfig, dtype: str, block_size: int) -> KVLayout:
    """The shape of this model's blocks."""
    return KVLayout(
        kv_heads=config.kv_heads,
        layers=config.num_layers,
        block_size=block_size,
        head_dim=config.head_dim,
        dtype=dtype,
    )


class TorchExecutor:
    """Implements engine.executor.Executor with a model of a Hugging Face directory and a pool in host memory."""

    def __init__(
        self,
        model_dir: str | Path,
        options: TorchOptions,
        clock: Callable[[], float] = lambda: 0.0,
        grammars: Masks | None = None,
    ) -> None:
        """Load the model; errors of the directory are those of ModelConfig.from_dir and Checkpoint.check.

        clock: seconds, for the phases of each step. grammars: made for this model's tokens; None: draws that have a
        grammar fail.
        """
        self._clock = clock
        self._grammars = grammars
        config = ModelConfig.from_dir(model_dir)
        torch.set_num_threads(options.threads)
        self.config = config
        self.layout = model_layout(config, options.dtype, options.block_size)
        backends = _backends(config, options)
        # Positions past the pool's tokens can never be computed: Llama 3.1's full table would be 64 MB.
        positions = min(config.max_positions, options.num_blocks * options.block_size)
        with torch.inference_mode(), Checkpoint(Path(model_dir), DTYPES[options.dtype]) as checkpoint:
            self._model = LlamaModel(config, checkpoint, backends, rope_table(config, positions))
        self._positions = positions
        self.pool = HostPool(self.layout, options.num_blocks)
        self.swap = HostPool(self.layout, options.swap_blocks) if options.swap_blocks else None
        self._kv: torch.Tensor | None = pool_tensor(self.pool)
        _log.info(
            "model loaded",
            attention=backends.attention.name,
            linear=backend_name(DTYPES[options.dtype]),
            dtype=options.dtype,
            threads=options.threads,
        )

    def run(self, plan: Plan) -> Result:
        """Compute a step: KV of all its rows into the pool, one token for each slice that samples.

        Blocks belong to the caller throughout. Internal: the plan does not fit the model, or logits are not finite.
        """
        assert self._kv is not None, "closed"
        clock = self._clock
        begun = clock()
        carry_out(plan, self.pool, self.swap)
        if not plan.slices:
            return Result(plan.step_id, ())
        with torch.inference_mode():
            moved = clock()
            batch = step_batch(plan)
            self._check(batch)
            built = clock()
            logits = self._model.forward(batch, self._kv)
            computed = clock()
            sampling = [s for s in plan.slices if s.samples]
            draws = draws_of(sampling)
            if len(draws) > len(sampling):  # several sequences draw from one row
                logits = logits.repeat_interleave(torch.tensor([s.num_samples for s in sampling]), dim=0)
            drawn = sample(logits.cpu().numpy(), draws, self._grammars)
            phases = Phases(built - moved, moved - begun + computed - built, clock() - computed)
            return Result(plan.step_id, drawn.token_ids, phases, drawn.logprobs, drawn.failures)

    def close(self) -> None:
        """Drop our view of the pool, then the pool. Nothing may write to it any more."""
        self._kv = None
        self.pool.close()
        if self.swap is not None:
            self.swap.close()

    def _check(self, batch: StepBatch) -> None:
        """Kernels read where ids and positions point: refuse what is outside instead of reading foreign memory."""
        low, high = (int(x) for x in batch.token_ids.aminmax())
        if low < 0 or high >= self.config.vocab:
            raise Internal(f"token ids {low} .. {high} of a step are outside the vocabulary of {self.config.vocab}")
        low, high = (int(x) for x in batch.block_tables.aminmax())
        if low < 0 or high >= self.pool.num_blocks:
            raise Internal(f"block {high if low >= 0 else low} of a step is not in a pool of {self.pool.num_blocks}")
        if (last := int(batch.context_lens.max())) > self._positions:
            raise Internal(f"a step reaches position {last - 1}, the model or pool ends at {self._positions - 1}")


def pool_tensor(pool: HostPool) -> torch.Tensor:
    """The pool's memory as [num_blocks, kv_heads, layers, 2, block_size, head_dim]; keeps the mapping alive."""
    flat = torch.frombuffer(pool.buffer, dtype=torch.uint8).view(DTYPES[pool.layout.dtype])
    return flat.view(pool.num_blocks, *pool.layout.shape)


def _backends(config: ModelConfig, options: TorchOptions) -> Backends:
    return Backends(
        attention=_attention(config, options),
        linear=partial(make_linear, threads=options.threads),
        head=partial(make_head, threads=options.threads),
        activation_dtype=activation_dtype(DTYPES[options.dtype]),
        threads=options.threads,
    )


def _attention(config: ModelConfig, options: TorchOptions) -> AttentionBackend:
    if options.attention == "reference":
        return ReferenceAttention(config.heads, config.kv_heads, config.head_dim)
    backend = cpu_attention(config.heads, config.kv_heads, config.head_dim, threads=options.threads)
    if options.attention == "cpu" and isinstance(backend, ReferenceAttention):
        raise InvalidArgument("attention cpu cannot run here; use auto or reference", field="attention")
    return backend
