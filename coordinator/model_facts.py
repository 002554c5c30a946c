"""What one coordinator serves, read once at start: identity, EOS ids, tokenizer. Knows no workers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from coordinator.text import BYTE_EOS, BYTE_VOCAB, ByteCodec, HuggingFaceCodec, TextCodec
from coordinator.validate import Limits
from kvrelay.config import CoordinatorConfig
from kvrelay.models.builtin import BUILTIN_EOS, BUILTIN_VOCAB, builtin_identity
from kvrelay.models.catalog import resolve
from kvrelay.models.config import ModelConfig, fingerprint, tokenizer_hash
from kvrelay.session import ModelIdentity

assert (BYTE_VOCAB, BYTE_EOS) == (BUILTIN_VOCAB, BUILTIN_EOS), "workers and coordinator must agree on bytes"


@dataclass(frozen=True, slots=True)
class ServedModel:
    identity: ModelIdentity
    eos_token_ids: tuple[int, ...]
    codec: TextCodec

    def limits(self, context_limit: int) -> Limits:
        """What requests are held to, and what GetModel reports."""
        return Limits(
            model_id=self.identity.model_id,
            vocab_size=self.identity.vocab_size,
            context_limit=context_limit,
            eos_token_ids=self.eos_token_ids,
            has_chat_template=self.codec.template is not None,
        )


def load_model(config: CoordinatorConfig) -> ServedModel:
    """NotFound or InvalidArgument (field model) when the directory is not usable. Reads every weight file once."""
    if config.executor != "torch":
        return ServedModel(builtin_identity(config.executor), (BUILTIN_EOS,), ByteCodec())
    directory = resolve(config.model)
    facts = ModelConfig.from_dir(directory)
    name = Path(config.model).resolve().name if Path(config.model).is_dir() else config.model
    identity = ModelIdentity(name, fingerprint(directory), facts.vocab, facts.max_positions, tokenizer_hash(directory))
    return ServedModel(identity, facts.eos_ids, HuggingFaceCodec(directory, facts.vocab))
