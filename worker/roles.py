"""What both roles' mains share: model facts, executor, transport, all from one configuration. Knows no services."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from engine.executor import Executor
from engine.hash_executor import HashExecutor, hash_layout
from kvrelay.blocks import KVLayout
from kvrelay.config import WorkerConfig
from kvrelay.errors import InvalidArgument, NotFound
from kvrelay.models.builtin import BUILTIN_EOS, BUILTIN_VOCAB, builtin_identity
from kvrelay.models.catalog import resolve
from kvrelay.models.config import ModelConfig, fingerprint, tokenizer_hash
from kvrelay.requests import Role
from kvrelay.session import ModelIdentity

if TYPE_CHECKING:
    from engine.sampler import Draw, Floats, Masks

MIB = 1024 * 1024
HASH_BLOCKS = 4096
"""Blocks of a pool whose size is not configured, for executors whose blocks weigh nearly nothing."""


def identity_of(config: WorkerConfig) -> ModelIdentity:
    """What this worker serves. Raises NotFound or InvalidArgument when the model directory is not usable."""
    if config.executor != "torch":
        return builtin_identity(config.executor)
    directory = resolve(config.model)
    facts = ModelConfig.from_dir(directory)
    return ModelIdentity(
        model_id=model_id_of(config.model),
        fingerprint=fingerprint(directory),
        vocab_size=facts.vocab,
        max_context=facts.max_positions,
        tokenizer_hash=tokenizer_hash(directory),
    )


def model_id_of(model: str) -> str:
    """The name clients use: the catalogue's id, or the last part of a directory's path."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def build_executor(config: WorkerConfig) -> Executor:
    """The configured executor with its pool. Called on the thread that will run it."""
    if config.executor == "torch":
        return _torch_executor(config)
    num_blocks = config.num_blocks or HASH_BLOCKS
    swap_blocks = swap_blocks_of(config, hash_layout(config.block_size))
    pace = (config.step_seconds, time.sleep)
    served = (config.block_size, BUILTIN_VOCAB, BUILTIN_EOS, *pace, swap_blocks, _ByteGrammars(), config.token_seconds)
    if config.executor == "hash":
        return HashExecutor(num_blocks, *served)
    from engine.scripted_executor import ScriptedExecutor

    script = read_script(config.script)
    try:
        return ScriptedExecutor(num_blocks, script, *served)
    except ValueError as error:
        raise InvalidArgument(f"{config.script}: {error}", field="script") from error


def swap_blocks_of(config: WorkerConfig, layout: KVLayout) -> int:
    """Blocks that a decode worker may put aside in host memory; 0 if it is to compute again instead."""
    if config.role is not Role.DECODE or config.preempt == "recompute":
        return 0
    return config.swap_mb * MIB // layout.block_bytes


def _torch_executor(config: WorkerConfig) -> Executor:
    from engine.grammars import Grammars
    from engine.torch_executor import TorchExecutor, TorchOptions, model_layout

    directory = resolve(config.model)
    facts = ModelConfig.from_dir(directory)
    layout: KVLayout = model_layout(facts, config.dtype, config.block_size)
    num_blocks = config.num_blocks or max(1, config.pool_mb * MIB // layout.block_bytes)
    options = TorchOptions(
        dtype=config.dtype,
        num_blocks=num_blocks,
        block_size=config.block_size,
        threads=config.threads,
        attention=config.attention,
        swap_blocks=swap_blocks_of(config, layout),
    )
    grammars = Grammars.of_directory(directory, facts.vocab, facts.eos_ids)
    return TorchExecutor(directory, options, time.monotonic, grammars)


class _ByteGrammars:
    """Masks of the models that need no directory. Nothing is imported before the first grammar: they need no numpy."""

    def __init__(self) -> None:
        self._grammars: Masks | None = None

    def disallow(self, row: Floats, draw: Draw) -> None:
        if self._grammars is None:
            from engine.grammars import Grammars

            self._grammars = Grammars.of_bytes(BUILTIN_VOCAB, BUILTIN_EOS)
        self._grammars.disallow(row, draw)


def read_script(path: str) -> list[int]:
    """Token ids of the scripted executor: a JSON list in a file."""
    if not path:
        raise InvalidArgument("the scripted executor needs a file with a JSON list of token ids", field="script")
    try:
        ids = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise NotFound(f"no such file: {path}", field="script") from None
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path}: {error}", field="script") from error
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise InvalidArgument(f"{path} is not a JSON list of token ids", field="script")
    return ids
