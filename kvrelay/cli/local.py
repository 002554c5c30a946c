"""`generate --local`: one engine in this process, no split. The reference that split serving is compared with.

Validation, tokenizing and the text path are the coordinator's own; scheduler and executor are a worker's own.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise

from coordinator.compiling import Compiling
from coordinator.constraints import Constraint
from coordinator.output import OutputText, output_texts
from coordinator.raw import Limits, RawRequest
from coordinator.request_wire import raw_request
from coordinator.text import ByteCodec, HuggingFaceCodec, TextCodec
from coordinator.validate import check, check_length, fit, last_of, sampling_of
from engine.block_pool import BlockPool
from engine.budgets import Budgets
from engine.events import Failed, Sampled
from engine.executor import Executor
from engine.local import LocalEngine
from engine.scheduler import Scheduler
from kvrelay.cli.ask import Ask, Listener
from kvrelay.client import Choice, GenerateOptions, GenerateResult, Logprobs, Prompt, Usage
from kvrelay.client.request import generate_request
from kvrelay.config import WorkerConfig
from kvrelay.config_load import load_worker
from kvrelay.errors import InvalidArgument
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
            raw = raw_request(generate_request(prompt, options), limits)  # as the coordinator would get it
            return _generate(config, executor, codec, limits, raw, listener)
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


def _generate(
    config: WorkerConfig, executor: Executor, codec: TextCodec, limits: Limits, raw: RawRequest, listener: Listener
) -> GenerateResult:
    began = time.perf_counter()
    check(raw, limits)
    prompt_ids = _prompt_ids(raw, codec, limits)
    stop = fit(raw, len(prompt_ids), limits)
    sampling = sampling_of(raw, secrets.randbits(63), limits, _grammar(raw.constraint, codec.directory))
    key = SequenceKey(SessionId(LOCAL), RequestId(f"local-{secrets.token_hex(8)}"), attempt=1)
    spec = SequenceSpec(key, prompt_ids, len(prompt_ids), sampling, stop, n=raw.n or 1)
    prompt_text = _echo(raw, prompt_ids, codec)
    if prompt_text:
        listener.prompt(prompt_text)
    answers = [
        _Answer(sequence, len(prompt_ids), text, stop, listener)
        for sequence, text in enumerate(_texts(raw, codec, stop))
    ]
    budgets = Budgets(max_tokens=config.step_tokens, max_sequences=config.max_sequences)
    engine = LocalEngine(executor, Scheduler(BlockPool(executor.pool.num_blocks), config.block_size, budgets))
    _run(engine, spec, answers, began)
    choices = [answer.choice for answer in answers if answer.choice is not None]
    return GenerateResult.of(key.request_id, sampling.seed, limits.model_id, choices, prompt_text)


def _run(engine: LocalEngine, spec: SequenceSpec, answers: Sequence[_Answer], began: float) -> None:
    for event in engine.stream([spec]):
        if isinstance(event, Failed):
            raise InvalidArgument(event.message)  # as a worker says it
        if isinstance(event, Sampled):
            answer = answers[event.key.sequence]
            answer.take(event, (time.perf_counter() - began) * 1000.0)
            if answer.choice is not None:
                engine.abort(event.key)  # it may have ended by its text, which no engine sees


def _prompt_ids(raw: RawRequest, codec: TextCodec, limits: Limits) -> tuple[int, ...]:
    """The tokens that are used, as coordinator/serving.py makes them."""
    if raw.token_ids is not None:
        return last_of(raw.token_ids, raw.truncate_prompt)
    text, add_special_tokens = raw.text, raw.add_special_tokens
    if text is None:
        assert raw.chat is not None and codec.template is not None, "checked by validate"
        text, add_special_tokens = codec.template.render(raw.chat, raw.tools, raw.template_variables), False
    check_length(raw, text, codec.longest_token, limits)
    return last_of(tuple(codec.encode(text, add_special_tokens)), raw.truncate_prompt)


def _grammar(constraint: Constraint | None, directory: str) -> str:
    if constraint is None:
        return ""
    compiling = Compiling(directory)
    try:
        return asyncio.run(compiling.grammar(constraint))
    finally:
        compiling.close()


def _echo(raw: RawRequest, prompt_ids: tuple[int, ...], codec: TextCodec) -> str:
    if not raw.echo:
        return ""
    if raw.text is not None and raw.truncate_prompt is None:
        return raw.text
    return codec.decode(prompt_ids, raw.skip_special_tokens)


def _texts(raw: RawRequest, codec: TextCodec, stop: StopRule) -> list[OutputText]:
    detokenizer = partial(codec.detokenizer, raw.skip_special_tokens)
    return output_texts(raw.n or 1, detokenizer, raw.stop, stop.stop_token_ids, raw.include_stop, stop.min_tokens)


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
        self._logprobs: list[Logprobs] = []
        self._times_ms: list[float] = []
        self._text = ""
        self.choice: Choice | None = None

    def take(self, sampled: Sampled, time_ms: float) -> None:
        """time_ms: since the request began."""
        token_id = sampled.token_id
        self._token_ids.append(token_id)
        self._times_ms.append(time_ms)
        if sampled.logprobs is not None:
            self._logprobs.append(sampled.logprobs)
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
            logprobs=tuple(self._logprobs),
        )
