"""`generate --local`: one engine in this process, no split. The reference that split serving is compared with.

Validation, tokenizing and the text path are the coordinator's own; scheduler and executor are a worker's own.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from itertools import pairwise

from coordinator.output import OutputText, output_texts
from coordinator.text import ByteCodec, HuggingFaceCodec, TextCodec
from coordinator.validate import Limits, RawRequest, check, fit, sampling_of
from engine.block_pool import BlockPool
from engine.budgets import Budgets
from engine.events import Sampled
from engine.executor import Executor
from engine.local import LocalEngine
from engine.scheduler import Scheduler
from kvrelay.cli.ask import Ask, Listener
from kvrelay.client import Choice, GenerateOptions, GenerateResult, Prompt, Usage
from kvrelay.config import WorkerConfig
from kvrelay.config_load import load_worker
from kvrelay.models.builtin import BUILTIN_EOS
from kvrelay.models.catalog import resolve
from kvrelay.models.config import ModelConfig
from kvrelay.requests import FinishReason, RequestId, Role, SequenceKey, SequenceSpec, SessionId, StopRule
from kvrelay.session import ModelIdentity
from worker.roles import build_executor, identity_of

LOCAL = "local"


def ask_local(engine: Mapping[str, object], options: GenerateOptions) -> Ask:
    """engine: flags of a worker (model, dtype, executor, ...), None where not given."""

    def ask(prompt: Prompt, listener: Listener) -> GenerateResult:
        config = load_worker(Role.DECODE, engine, env=os.environ)
        identity, codec, eos_ids = _model_of(config)
        executor = build_executor(config)
        try:
            context = min(identity.max_context, executor.pool.num_blocks * config.block_size)
            has_template = codec.template is not None
            limits = Limits(identity.model_id, identity.vocab_size, context, eos_ids, has_template)
            return _generate(config, executor, codec, limits, _raw(prompt, options), listener)
        finally:
            executor.close()

    return ask


def _model_of(config: WorkerConfig) -> tuple[ModelIdentity, TextCodec, tuple[int, ...]]:
    identity = identity_of(config)
    if config.executor != "torch":
        return identity, ByteCodec(), (BUILTIN_EOS,)
    directory = resolve(config.model)
    facts = ModelConfig.from_dir(directory)
    return identity, HuggingFaceCodec(directory, facts.vocab), facts.eos_ids


def _raw(prompt: Prompt, options: GenerateOptions) -> RawRequest:
    """The request as the coordinator would get it."""
    text = prompt if isinstance(prompt, str) else None
    chat = None if text is not None else tuple(dict(m) for m in prompt if isinstance(m, Mapping))
    token_ids = None if text is not None or chat else tuple(i for i in prompt if isinstance(i, int))
    return RawRequest(
        text=text,
        token_ids=token_ids,
        chat=chat or None,
        temperature=options.get("temperature"),
        top_p=options.get("top_p"),
        top_k=options.get("top_k"),
        seed=options.get("seed"),
        max_tokens=options.get("max_tokens"),
        stop=tuple(options.get("stop") or ()),
        ignore_eos=bool(options.get("ignore_eos")),
        n=options.get("n"),
    )


def _generate(
    config: WorkerConfig, executor: Executor, codec: TextCodec, limits: Limits, raw: RawRequest, listener: Listener
) -> GenerateResult:
    began = time.perf_counter()
    check(raw, limits)
    prompt_ids = _prompt_ids(raw, codec)
    stop = fit(raw, len(prompt_ids), limits)
    sampling = sampling_of(raw, secrets.randbits(63), limits)
    key = SequenceKey(SessionId(LOCAL), RequestId(f"local-{secrets.token_hex(8)}"), attempt=1)
    spec = SequenceSpec(key, prompt_ids, len(prompt_ids), sampling, stop, n=raw.n or 1)
    texts = output_texts(spec.n, codec.detokenizer, raw.stop, stop.stop_token_ids)
    answers = [_Answer(sequence, len(prompt_ids), text, stop, listener) for sequence, text in enumerate(texts)]
    budgets = Budgets(max_tokens=config.step_tokens, max_sequences=config.max_sequences)
    engine = LocalEngine(executor, Scheduler(BlockPool(executor.pool.num_blocks), config.block_size, budgets))
    for event in engine.stream([spec]):
        if isinstance(event, Sampled):
            answer = answers[event.key.sequence]
            answer.take(event.token_id, (time.perf_counter() - began) * 1000.0)
            if answer.choice is not None:
                engine.abort(event.key)  # it may have ended by its text, which no engine sees
    choices = [answer.choice for answer in answers if answer.choice is not None]
    return GenerateResult.of(key.request_id, sampling.seed, limits.model_id, choices)


def _prompt_ids(raw: RawRequest, codec: TextCodec) -> tuple[int, ...]:
    if raw.token_ids is not None:
        return raw.token_ids
    if raw.text is not None:
        return tuple(codec.encode(raw.text, add_special_tokens=True))
    assert raw.chat is not None and codec.template is not None  # `check` saw to it
    return tuple(codec.encode(codec.template.render(raw.chat), add_special_tokens=False))


class _Answer:
    """One sequence: tokens -> text, and when it ends: the earliest index wins, at one index stop before length.

    choice: what became of it, once it has ended.
    """

    def __init__(
        self, sequence: int, num_prompt_tokens: int, output: OutputText, rule: StopRule, listener: Listener
    ) -> None:
        self._sequence, self._num_prompt_tokens = sequence, num_prompt_tokens
        self._output, self._rule, self._listener = output, rule, listener
        self._token_ids: list[int] = []
        self._times_ms: list[float] = []
        self._text = ""
        self.choice: Choice | None = None

    def take(self, token_id: int, time_ms: float) -> None:
        """time_ms: since the request began."""
        self._token_ids.append(token_id)
        self._times_ms.append(time_ms)
        text, hit = self._output.push(token_id)
        reason = FinishReason.STOP if hit else self._rule.finish_of(len(self._token_ids) - 1, token_id)
        if reason is None:
            self._say(text)
            return
        self._say(text + self._output.finish())
        self.choice = self._choice(reason)
        self._listener.choice(self.choice)

    def _say(self, text: str) -> None:
        self._text += text
        self._listener.text(text)

    def _choice(self, reason: FinishReason) -> Choice:
        return Choice(
            sequence=self._sequence,
            token_ids=tuple(self._token_ids),
            text=self._text,
            tail="",
            finish_reason=reason.value,
            usage=Usage(self._num_prompt_tokens, len(self._token_ids), 0),
            ttft_ms=self._times_ms[0],
            gaps_ms=tuple(later - earlier for earlier, later in pairwise(self._times_ms)),
            prefill_worker=LOCAL,
            decode_worker=LOCAL,
            hand_off=None,
        )
