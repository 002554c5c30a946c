"""Known faults of a request's life: lost, doubled or wrong tokens, lost requests, blocks that nobody gives back."""

from __future__ import annotations

from known_fault import Fault, one_edit

DECODE = "decode_svc/core.py"
LIFECYCLE, MOVES, STATES = "coordinator/lifecycle.py", "coordinator/moves.py", "coordinator/states.py"

_LIFE = (
    one_edit(
        "token-0-not-in-start",
        "decode is started without the token that prefill sampled",
        LIFECYCLE,
        "    start = Start(state.facts.request_id, state.attempt, (emit.token_id,))\n",
        "    start = Start(state.facts.request_id, state.attempt, ())\n",
    ),
    one_edit(
        "token-0-not-journaled",
        "the token that prefill sampled goes to decode, and neither into the journal nor to the client",
        LIFECYCLE,
        "    actions: list[Action] = [emit, SendCommand(placement.decode, start), ",
        "    actions: list[Action] = [SendCommand(placement.decode, start), ",
    ),
    one_edit(
        "end-at-token-0-keeps-decode",
        "decode is not told when the first token already ends the request",
        LIFECYCLE,
        """    elif state.fork is not None:  # decode has the first tokens of all n, and knows those that end by rule
""",
        """    elif state.fork is None:
        state = replace(state, decode_ended=True)
    else:
""",
    ),
    one_edit(
        "runs-before-landed",
        "Start alone makes a sequence runnable, whether its blocks have landed or not",
        DECODE,
        """        if attempt.landed and attempt.first_tokens:
            fault_point("decode.started")
""",
        """        if attempt.first_tokens and not attempt.running and attempt.ticket is not None:
            fault_point("decode.started")
            attempt.block_ids = attempt.ticket.table.block_ids
""",
    ),
    one_edit(
        "old-attempt-accepted",
        "the coordinator takes a token of an attempt that it has given up",
        LIFECYCLE,
        "    if state.placement is None or event.attempt != state.attempt or event.index != state.num_tokens:\n",
        "    if state.placement is None or event.index != state.num_tokens:\n",
    ),
    one_edit(
        "attempt-not-raised",
        "a request moves under the number of the attempt before",
        MOVES,
        "    fresh = State(state.facts, attempt=state.attempt + 1, num_tokens=state.num_tokens, tries=tries)\n",
        "    fresh = State(state.facts, attempt=state.attempt, num_tokens=state.num_tokens, tries=tries)\n",
    ),
    one_edit(
        "old-attempt-not-aborted",
        "a request that moves leaves its old attempt with the workers that live",
        MOVES,
        "    return fresh, [*_leave(state), requeue]\n",
        "    return fresh, [ReleasePlacement(state.prefiller(), state.decoder()), requeue]\n",
    ),
    one_edit(
        "moved-without-its-tokens",
        "a request that moves starts again from its prompt alone",
        STATES,
        "        token_ids=facts.prompt_ids + state.tokens_so_far,\n",
        "        token_ids=facts.prompt_ids,\n",
    ),
    one_edit(
        "moved-with-shifted-index",
        "a request that moves counts its tokens so far as prompt: index, seed and limit are shifted",
        STATES,
        "        num_prompt_tokens=len(facts.prompt_ids),\n",
        "        num_prompt_tokens=len(facts.prompt_ids) + len(state.tokens_so_far),\n",
    ),
    one_edit(
        "requeue-loses-the-request",
        "a request that moves is not put back into the queue",
        "coordinator/actions.py",
        "        self._queue.add(live)\n",
        "",
    ),
    one_edit(
        "requeued-twice",
        "a request that moves is put into the queue twice, and placed twice",
        "coordinator/waiting.py",
        "        line.insert(at, _Entry(live.order, since, live, live.want()))\n",
        """        line.insert(at, _Entry(live.order, since, live, live.want()))
        if live.state.attempt > 0:
            line.insert(at, line[at])
""",
    ),
    one_edit(
        "lost-worker-not-told",
        "nobody tells a request that its worker is gone",
        "coordinator/roster.py",
        "            self.owner.on_worker_lost(worker, why)\n",
        "            pass\n",
    ),
    one_edit(
        "client-gone-keeps-workers",
        "a client that leaves does not stop what the workers do for it",
        LIFECYCLE,
        """    return end(state, Fail(errors.Cancelled("the client left")))
""",
        """    return replace(state, phase=Phase.ENDED), [Fail(errors.Cancelled("the client left"))]
""",
    ),
    one_edit(
        "own-pause-accuses-peers",
        "silence during one's own pause counts against the peers",
        "kvrelay/liveness.py",
        "        late = now - self.checked_at - interval_s > MAX_LAG_S\n",
        "        late = False\n",
    ),
)

_WORKERS = (
    one_edit(
        "session-end-keeps-attempts",
        "the end of a session leaves what came through it",
        "worker/desk.py",
        """            for attempt in self.attempts.of_session(event.session):
                self._drop(attempt, now)
""",
        "",
    ),
    one_edit(
        "no-tombstone",
        "an abort that overtook its request leaves no tombstone, and the request is begun",
        "worker/desk.py",
        "            self.attempts.bury(key)\n",
        "            pass\n",
    ),
    one_edit(
        "merge-drops-reserved",
        "two reports that merge keep the tickets of one",
        "kvrelay/session.py",
        "            reserved=self.reserved + later.reserved,\n",
        "            reserved=later.reserved or self.reserved,\n",
    ),
    one_edit(
        "merge-drops-tokens",
        "two reports that merge keep the tokens of one",
        "kvrelay/session.py",
        "            tokens=self.tokens + later.tokens,\n",
        "            tokens=later.tokens or self.tokens,\n",
    ),
    one_edit(
        "merge-drops-ended",
        "two reports that merge keep the endings of one",
        "kvrelay/session.py",
        "            ended=self.ended + later.ended,\n",
        "            ended=later.ended or self.ended,\n",
    ),
    one_edit(
        "preempted-keeps-computed",
        "a preempted sequence believes that its tokens are still computed",
        "engine/room.py",
        "        seq.num_computed = 0\n",
        "",
    ),
    one_edit(
        "grant-takes-what-runs-need",
        "tickets get blocks that running sequences, or the head of the queue, are about to need",
        DECODE,
        "PoolRoom(counts.total, self._p.scheduler.spare_blocks, ",
        "PoolRoom(counts.total, self._p.pool.num_free, ",
    ),
    one_edit(
        "head-of-reserves-starves",
        "small reserves pass a big one for ever",
        "decode_svc/grants.py",
        "        if head_blocked_s >= MAX_PASSING_S:\n            return None\n",
        "",
    ),
)

LIFE_FAULTS: tuple[Fault, ...] = (*_LIFE, *_WORKERS)
