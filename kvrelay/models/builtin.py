"""Facts of the models that need no directory: the hash and scripted executors. Their tokens are bytes."""

from __future__ import annotations

from kvrelay.session import ModelIdentity

BUILTIN_VOCAB = 258
"""Token ids 0 .. 255 are bytes, 256 ends a text, 257 begins one."""
BUILTIN_EOS = 256
BUILTIN_BOS = 257
BUILTIN_CONTEXT = 131_072


def builtin_identity(executor: str) -> ModelIdentity:
    """What workers with this executor, and their coordinator, say they serve."""
    return ModelIdentity(executor, f"builtin-{executor}-1", BUILTIN_VOCAB, BUILTIN_CONTEXT)
