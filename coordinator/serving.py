"""What every door does with a request, whatever protocol it came in: judged, tokenized, taken in, told of.

Knows no protos and no HTTP. A door makes a RawRequest, opens it, reads the stream of what it gets and closes it, once.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from uuid import uuid4

import structlog

from coordinator import validate
from coordinator.admission import Room
from coordinator.chat import extent
from coordinator.dispatch import Dispatcher
from coordinator.live import Live, Times
from coordinator.model_facts import ServedModel
from coordinator.output import OutputText, output_texts
from coordinator.roster import Roster
from coordinator.states import RequestFacts
from coordinator.stream import Item, TokenItem
from coordinator.telling import Telling
from coordinator.text import LONG_TEXT, MANY_TOKENS, KeysOf, Tokenizing
from coordinator.validate import Limits, RawRequest
from kvrelay.blocks import BlockKey, KeyScope, block_keys
from kvrelay.errors import DeadlineExceeded
from kvrelay.requests import RequestId, StopRule
from kvrelay.telemetry.calls import labelled
from kvrelay.telemetry.tracing import traceparent_of

log = structlog.get_logger("coordinator.serving")

TENANT = "default"
"""Of every request, as nobody says who sends it."""
Prompt = tuple[tuple[int, ...], tuple[BlockKey, ...]]
"""Its tokens and the keys of their full blocks."""


class Serving:
    def __init__(
        self, model: ServedModel, tokenizing: Tokenizing, dispatcher: Dispatcher, roster: Roster, telling: Telling
    ) -> None:
        self.model = model
        self.tokenizing = tokenizing
        self._dispatcher = dispatcher
        self._roster = roster
        self._telling = telling

    @property
    def limits(self) -> Limits:
        return self.model.limits(self._roster.context_limit)

    @property
    def most_at_once(self) -> int:
        """Requests that can ever come in together."""
        return self._dispatcher.most_at_once

    def room(self, count: int) -> AbstractContextManager[Room]:
        """Keeps room for so many requests while they are opened; raises at once if there is not enough for all."""
        return self._dispatcher.room(count)

    async def open(
        self,
        raw: RawRequest,
        times: Times,
        deadline_at: float | None = None,
        request_id: str = "",
        room: Room | None = None,
    ) -> Live:
        """Takes a request in, or raises what is wrong with it. deadline_at: on the clock of times.accepted_at.

        request_id: a new one that the door has told its client of already; empty: there is none yet. room: that is kept
        for it and others of its call.

        The caller calls `close` once, whatever happens.
        """
        limits = self.limits
        many = raw.token_ids is not None and len(raw.token_ids) >= MANY_TOKENS
        if many:
            await others_first()  # they have just been copied
        validate.check(raw, limits)
        if many:
            await others_first()
        label = labelled(raw.client_request_id)
        self._dispatcher.check_room(raw.max_tokens != 1, room)
        prompt = await self._prompt(raw, limits)
        stop = validate.fit(raw, len(prompt[0]), limits)
        grammar = await self.tokenizing.grammar(raw.constraint) if raw.constraint is not None else ""
        prompt_text = await self._echo(raw, prompt[0]) if raw.echo else ""
        facts = self._facts(raw, prompt, stop, grammar, limits, deadline_at, request_id)
        text, *more = self._texts(raw, stop)
        live = self._dispatcher.submit(facts, text, times, tuple(more), room)
        live.prompt_text = prompt_text
        self._telling.started()
        log.debug("taken in", request=facts.request_id, label=label)
        return live

    def leave(self, live: Live) -> None:
        """Nobody reads its stream any more. Idempotent."""
        self._dispatcher.leave(live.id)

    def close(self, live: Live) -> None:
        self._dispatcher.leave(live.id)
        self._telling.ended(live, self.model.identity.model_id, time.monotonic())

    async def tokenize(self, model: str, text: str, add_special_tokens: bool = True) -> list[int]:
        """Of at most MAX_TEXT_BYTES."""
        validate.check_model(model, self.limits)
        validate.check_text_to_tokenize(text)
        return await self.tokenizing.encode(text, add_special_tokens)

    async def prompt_tokens(self, raw: RawRequest) -> tuple[int, ...]:
        """The tokens that the prompt of such a request has, as `open` makes them. Raises as it does."""
        limits = self.limits
        validate.check(raw, limits)
        token_ids, _ = await self._prompt(replace(raw, prefix_cache=False), limits)
        return token_ids

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        """At most MAX_TOKEN_IDS: nothing is done with so much as one of more."""
        limits = self.limits
        validate.check_model(model, limits)
        validate.check_token_ids_count(len(token_ids))
        return await self.tokenizing.aside(len(token_ids), self._judged_text, token_ids, limits.vocab_size)

    def _judged_text(self, token_ids: Sequence[int], vocab_size: int) -> str:
        ids = tuple(token_ids)
        validate.check_token_ids("token_ids", ids, vocab_size)
        return self.model.codec.decode(ids)

    async def _prompt(self, raw: RawRequest, limits: Limits) -> Prompt:
        """A template writes special tokens itself: none are added here."""
        keys_of, most = self._keys_of(raw), raw.truncate_prompt
        if raw.token_ids is not None:
            token_ids = validate.last_of(raw.token_ids, most)
            return token_ids, await self.tokenizing.keys(token_ids, keys_of) if keys_of is not None else ()
        if raw.text is not None:
            validate.check_length(raw, raw.text, self.model.codec.longest_token, limits)
            return await self.tokenizing.prompt(raw.text, raw.add_special_tokens, keys_of, most)
        size = extent((raw.chat, raw.tools, raw.template_variables), LONG_TEXT)
        return await self.tokenizing.rendered(
            functools.partial(self._chat_text, raw, limits), size, False, keys_of, most
        )

    def _chat_text(self, raw: RawRequest, limits: Limits) -> str:
        codec = self.model.codec
        assert codec.template is not None, "checked by validate"
        text = codec.template.render(raw.chat or (), raw.tools, raw.template_variables)
        validate.check_length(raw, text, codec.longest_token, limits)
        return text

    async def _echo(self, raw: RawRequest, prompt_ids: tuple[int, ...]) -> str:
        """The text of the prompt: as it came, where it came as text and all of it is used."""
        if raw.text is not None and raw.truncate_prompt is None:
            return raw.text
        return await self.tokenizing.decode(prompt_ids, raw.skip_special_tokens)

    def _texts(self, raw: RawRequest, stop: StopRule) -> list[OutputText]:
        detokenizer = functools.partial(self.model.codec.detokenizer, raw.skip_special_tokens)
        return output_texts(raw.n or 1, detokenizer, raw.stop, stop.stop_token_ids, raw.include_stop, stop.min_tokens)

    def _keys_of(self, raw: RawRequest) -> KeysOf | None:
        """By which the router finds the prompt in caches; None where it does not look, or the request wants none."""
        if raw.prefix_cache is False or not self._dispatcher.routes_by_keys:
            return None
        scope = KeyScope(TENANT, self.model.identity.fingerprint, cache_salt=raw.cache_salt)
        return functools.partial(block_keys, scope, block_size=self._roster.block_size)

    def _facts(
        self,
        raw: RawRequest,
        prompt: Prompt,
        stop: StopRule,
        grammar: str,
        limits: Limits,
        deadline_at: float | None,
        request_id: str,
    ) -> RequestFacts:
        if deadline_at is not None and deadline_at <= time.monotonic():
            raise DeadlineExceeded("the deadline passed while the prompt was tokenized")
        prompt_ids, keys = prompt
        return RequestFacts(
            request_id=RequestId(request_id or uuid4().hex),
            prompt_ids=prompt_ids,
            sampling=validate.sampling_of(raw, secrets.randbits(64), limits, grammar),
            stop=stop,
            tenant=TENANT,
            cache_salt=raw.cache_salt,
            deadline_at=deadline_at,
            traceparent=traceparent_of(),
            n=raw.n or 1,
            prefix_cache=raw.prefix_cache is not False,
            keys=keys,
            priority=raw.priority,
        )


async def others_first() -> None:
    """Lets everything run that is ready, as every stream stood for some time. The first turn only asks what is."""
    for _ in range(2):
        await asyncio.sleep(0)


class Reading:
    """The items of one stream, for a door that writes each before it takes the next.

    When a token has been written is kept in the journal: that is where its gap ends.
    """

    def __init__(self, live: Live) -> None:
        self._live = live
        self._task = asyncio.current_task()
        self._token: TokenItem | None = None

    async def take(self) -> Item:
        """The next item; waits for it."""
        return await self._live.stream.take()

    def writing(self, item: Item | None = None) -> None:
        """A write begins, of this item; the first one of a stream is of none."""
        self._token = item if type(item) is TokenItem else None
        self._live.stream.writing(self._task)

    def written(self) -> None:
        at = self._live.stream.writing(None)
        token = self._token
        if token is not None:
            live = self._live
            journal = live.children[token.sequence].journal if live.children else live.journal
            journal.sent.append(at)
            self._token = None

    def gone(self) -> None:
        """The write under way came to nothing."""
        self._live.stream.writing(None)
