"""Known faults of the hand-off: memory that is reused while it may be written to or read, and what leads there."""

from __future__ import annotations

from known_fault import Edit, Fault, one_edit

RECEIVER, WRITER = "kvtransfer/receiver_steps.py", "kvtransfer/writer_steps.py"
DECODE, PREFILL = "decode_svc/core.py", "prefill_svc/core.py"

_MEMORY_AT_DECODE = (
    one_edit(
        "free-at-lease-end",
        "the end of a lease frees the blocks of a ticket that is being written to",
        RECEIVER,
        """    return _lose(t, "the writer's lease ended", Count("lease_expired")) if now >= t.lease_until else (t, ())
""",
        """    if now < t.lease_until:
        return t, ()
    t, lost = _lose(t, "the writer's lease ended", Count("lease_expired"))
    if t.state is TicketState.ENDED:
        return t, lost
    t, ended = _end(t)
    return t, lost + ended
""",
    ),
    one_edit(
        "free-quarantined-at-lease-end",
        "a quarantined ticket's blocks come back when its lease has ended, without a fence",
        "kvtransfer/receiver_ticket.py",
        "FORCED_S = 30.0",
        "FORCED_S = 0.0",
    ),
    one_edit(
        "skip-fence",
        "an abort while blocks are being written frees them at once",
        RECEIVER,
        """    return _stop(t, "aborted")
""",
        """    t, actions = _stop(t, "aborted")
    if t.state is TicketState.ENDED:
        return t, actions
    t, ended = _end(t)
    return t, actions + ended
""",
    ),
    one_edit(
        "link-lost-frees-at-once",
        "a link closed by the writer's kernel frees its blocks with no second for what is on the wire",
        "kvtransfer/receiver_ticket.py",
        "PEER_GONE_S = 3.0",
        "PEER_GONE_S = 0.0",
    ),
    one_edit(
        "reconnected-writer-counts-as-dead",
        "a writer that dialled again is still taken for dead, and its blocks are freed a second later",
        RECEIVER,
        "    return (replace(t, gone_at=None) if event.writer == t.writer else t), ()",
        "    return t, ()",
    ),
    Fault(
        "count-instead-of-positions",
        "landed when enough blocks were counted: a part that is told twice counts twice",
        (
            Edit(
                RECEIVER,
                """    if m.part in t.parts:
        return t, (Count("duplicate_part"),)
""",
                "",
            ),
            Edit(
                RECEIVER,
                "missing=t.missing.difference(m.positions))",
                "missing=frozenset(sorted(t.missing)[len(m.positions) :]))",
            ),
        ),
    ),
    one_edit(
        "hold-before-landed",
        "the first part that arrives makes the whole ticket landed: its blocks are held and published",
        RECEIVER,
        "    return (t, ()) if t.missing else _land(t)\n",
        "    return _land(t)\n",
    ),
    one_edit(
        "last-part-means-landed",
        "the part marked as the last one makes the ticket landed, though parts overtake each other",
        RECEIVER,
        "    return (t, ()) if t.missing else _land(t)\n",
        "    return (t, ()) if t.missing and not m.last_part else _land(t)\n",
    ),
    one_edit(
        "partial-block-not-pushed",
        "the last, partly filled block of a prompt is not waited for",
        "kvrelay/blocks.py",
        "        return range(self.num_cached_blocks, blocks_for(num_tokens, self.table.block_size))",
        "        return range(self.num_cached_blocks, num_tokens // self.table.block_size)",
    ),
    one_edit(
        "stale-epoch-accepted",
        "what speaks of a ticket that has ended counts for the newest one",
        "kvtransfer/receiver.py",
        """        ticket = self._tickets.get(epoch)
        if ticket is None:
            return (STALE,)
""",
        """        epoch = epoch if epoch in self._tickets else max(self._tickets, default=epoch)
        ticket = self._tickets.get(epoch)
        if ticket is None:
            return (STALE,)
""",
    ),
    one_edit(
        "epoch-used-again",
        "a ticket's epoch is the number of tickets that are open, so that epochs come back",
        DECODE,
        "        self._epoch += 1\n",
        """        self._epoch = 1
        while self._p.table.state(self._epoch) is not None:
            self._epoch += 1
""",
    ),
    one_edit(
        "manifest-of-another-writer",
        "a manifest of another writer or another incarnation counts",
        RECEIVER,
        """    if m.incarnation != t.ticket.incarnation or m.writer != t.writer or event.sender not in (None, t.writer):
        return t, (STALE,)
""",
        "",
    ),
    one_edit(
        "open-of-another-incarnation",
        "a ticket of another incarnation of the decode worker is opened",
        RECEIVER,
        """    if msg.incarnation != t.ticket.incarnation:
        return _refuse(t, writer, "the ticket is of another incarnation")
    if (msg.request_id, msg.attempt) != (t.key.request_id, t.key.attempt):
        return _refuse(t, writer, "the ticket is of another request or attempt")
""",
        "",
    ),
)

_MEMORY_AT_PREFILL = (
    one_edit(
        "fenced-after-a-bad-write",
        "fenced is said although a write ended badly and may still land",
        WRITER,
        "    if not event.posted or t.rules.refuses_late:\n",
        "    if event.posted or not event.posted:\n",
    ),
    one_edit(
        "fenced-while-writing",
        "fenced is said while writes are still under way",
        WRITER,
        "    if t.state is not WriterState.CLOSING or t.posted or t.failed or t.doomed:\n",
        "    if t.state is not WriterState.CLOSING or t.failed or t.doomed:\n",
    ),
    one_edit(
        "fence-forgotten-without-a-link",
        "a fence that falls due while the link is down is never said",
        "kvtransfer/writer.py",
        "                self._fences[peer, action.message.epoch] = None\n",
        "                pass\n",
    ),
    one_edit(
        "part-posted-twice",
        "a part whose write failed is posted once more",
        WRITER,
        """    reason = f"write of part {event.part} failed: {event.error}"
""",
        """    reason = f"write of part {event.part} failed: {event.error}"
    if t.state is WriterState.OPEN:
        return replace(t, posted=(*t.posted, part)), (Count("write_failed"), Post(_part(t, part)))
""",
    ),
    one_edit(
        "posted-before-opened",
        "writes begin before decode has opened the ticket",
        WRITER,
        "    return _post_queued(t, now) if t.state is WriterState.OPEN else (t, ())\n",
        "    return _post_queued(t, now)\n",
    ),
    one_edit(
        "sources-released-early",
        "an abort releases the sources of writes that are still under way",
        WRITER,
        "    actions: tuple[WriterAction, ...] = _sources(t.queued)\n",
        """    actions: tuple[WriterAction, ...] = _sources((*t.queued, *t.posted))
    t = replace(t, posted=tuple(replace(part, source_ids=()) for part in t.posted))
""",
    ),
    one_edit(
        "part-without-a-reference",
        "a part holds no reference on its sources, so the end of the sequence frees them under the write",
        PREFILL,
        "            self._p.pool.retain(sources)\n",
        "",
    ),
    one_edit(
        "write-outlives-its-link",
        "a write may go on for long after the link to its decode worker was lost",
        "kvtransfer/writer_ticket.py",
        "LINK_LOST_EXIT_S = 0.8",
        "LINK_LOST_EXIT_S = 20.0",
    ),
    Fault(
        "new-incarnation-taken-for-old",
        "a decode worker that was started again on the same address is taken for the one before",
        (
            Edit("worker/link_client.py", "        if welcome.incarnation != target.peer:\n", "        if False:\n"),
            Edit("worker/link_server.py", "    if hello.decode_incarnation != mine.incarnation:\n", "    if False:\n"),
        ),
    ),
    one_edit(
        "peer-dropped-under-its-link",
        "the transport forgets a decode worker while a new link to it comes up, and writes over that link are in vain",
        "worker/link_client.py",
        "        if peer not in self._links:\n            drop(peer)\n",
        "        drop(peer)\n",
    ),
    one_edit(
        "stuck-write-renewed-for-ever",
        "a write that never ends is waited for as long as its lease is renewed",
        WRITER,
        "    if t.posted and now >= max(t.moved_at, event.wrote_at) + STUCK_WRITE_S:\n",
        "    if False:\n",
    ),
    one_edit(
        "written-and-never-landed",
        "a hand-off that is written and never lands is waited for as long as its lease is renewed",
        WRITER,
        "    if t.is_written and now >= t.moved_at + STUCK_WRITE_S:\n",
        "    if False:\n",
    ),
    one_edit(
        "dead-peer-kept",
        "the writer keeps the descriptors of a decode incarnation that is gone",
        "prefill_svc/peers.py",
        "                actions.append(DropPeer(peer))\n",
        "                pass\n",
    ),
)

HANDOFF_FAULTS: tuple[Fault, ...] = (*_MEMORY_AT_DECODE, *_MEMORY_AT_PREFILL)
