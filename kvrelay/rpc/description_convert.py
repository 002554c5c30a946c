"""Blocks, layouts, tickets, descriptions and load <-> protos. Knows the vocabulary, not who sends it.

Reading is strict: a missing or out-of-range field raises InvalidArgument with its path; unknown fields are ignored.
"""

from __future__ import annotations

from kvrelay.blocks import DTYPE_BYTES, BlockCounts, BlockTable, KVLayout, Ticket, blocks_for
from kvrelay.requests import Incarnation, Role, WorkerId
from kvrelay.rpc.fields import at_least, at_most, enum_of, number, one_of, only_one, present, text
from kvrelay.session import Load, ModelIdentity, WorkerDescription
from kvrelay.v1 import common_pb2

ROLE_NUMBERS = {Role.PREFILL: common_pb2.ROLE_PREFILL, Role.DECODE: common_pb2.ROLE_DECODE}
ROLES: dict[int, Role] = {number: role for role, number in ROLE_NUMBERS.items()}


def layout_to_proto(layout: KVLayout) -> common_pb2.KVLayout:
    return common_pb2.KVLayout(
        kv_heads=layout.kv_heads,
        layers=layout.layers,
        block_size=layout.block_size,
        head_dim=layout.head_dim,
        dtype=layout.dtype,
        layer_group=layout.layer_group,
        shards=layout.shards,
    )


def layout_from_proto(proto: common_pb2.KVLayout, path: str = "layout") -> KVLayout:
    return KVLayout(
        kv_heads=at_least(proto.kv_heads, 1, f"{path}.kv_heads"),
        layers=at_least(proto.layers, 1, f"{path}.layers"),
        block_size=at_least(proto.block_size, 1, f"{path}.block_size"),
        head_dim=at_least(proto.head_dim, 1, f"{path}.head_dim"),
        dtype=one_of(proto.dtype, tuple(DTYPE_BYTES), f"{path}.dtype"),
        layer_group=proto.layer_group,
        shards=at_least(proto.shards, 1, f"{path}.shards"),
    )


def table_to_proto(table: BlockTable) -> common_pb2.BlockTable:
    return common_pb2.BlockTable(
        layer_group=table.layer_group,
        block_size=table.block_size,
        block_ids=table.block_ids,
        num_tokens=table.num_tokens,
    )


def table_from_proto(proto: common_pb2.BlockTable, path: str = "table") -> BlockTable:
    block_size = at_least(proto.block_size, 1, f"{path}.block_size")
    block_ids = tuple(proto.block_ids)
    num_tokens = at_most(proto.num_tokens, block_size * len(block_ids), f"{path}.num_tokens")
    return BlockTable(proto.layer_group, block_size, block_ids, num_tokens)


def ticket_to_proto(ticket: Ticket) -> common_pb2.Ticket:
    return common_pb2.Ticket(
        incarnation=ticket.incarnation,
        epoch=ticket.epoch,
        tables=[table_to_proto(ticket.table)],
        num_cached_blocks=ticket.num_cached_blocks,
    )


def ticket_from_proto(proto: common_pb2.Ticket, path: str = "ticket") -> Ticket:
    table = table_from_proto(only_one(proto.tables, f"{path}.tables"), f"{path}.tables[0]")
    used = blocks_for(table.num_tokens, table.block_size)
    return Ticket(
        incarnation=Incarnation(text(proto.incarnation, f"{path}.incarnation")),
        epoch=proto.epoch,
        table=table,
        num_cached_blocks=at_most(proto.num_cached_blocks, used, f"{path}.num_cached_blocks"),
    )


def model_to_proto(model: ModelIdentity) -> common_pb2.ModelIdentity:
    return common_pb2.ModelIdentity(
        model_id=model.model_id,
        fingerprint=model.fingerprint,
        vocab_size=model.vocab_size,
        max_context=model.max_context,
        tokenizer_hash=model.tokenizer_hash,
    )


def model_from_proto(proto: common_pb2.ModelIdentity, path: str = "model") -> ModelIdentity:
    return ModelIdentity(
        model_id=text(proto.model_id, f"{path}.model_id"),
        fingerprint=text(proto.fingerprint, f"{path}.fingerprint"),
        vocab_size=at_least(proto.vocab_size, 1, f"{path}.vocab_size"),
        max_context=at_least(proto.max_context, 1, f"{path}.max_context"),
        tokenizer_hash=proto.tokenizer_hash,
    )


def description_to_proto(description: WorkerDescription) -> common_pb2.WorkerDescription:
    return common_pb2.WorkerDescription(
        worker_id=description.worker_id,
        role=ROLE_NUMBERS[description.role],
        incarnation=description.incarnation,
        pid=description.pid,
        address=description.address,
        model=model_to_proto(description.model),
        layouts=[layout_to_proto(description.layout)],
        num_blocks=description.num_blocks,
        transport=description.transport,
        executor=description.executor,
        max_sequences=description.max_sequences,
        step_tokens=description.step_tokens,
        protocol_version=description.protocol_version,
        verify_kv=description.verify_kv,
        prefix_cache=description.prefix_cache,
    )


def description_from_proto(proto: common_pb2.WorkerDescription, path: str = "description") -> WorkerDescription:
    present(proto, "model", path)
    layout = only_one(proto.layouts, f"{path}.layouts")
    return WorkerDescription(
        worker_id=WorkerId(text(proto.worker_id, f"{path}.worker_id")),
        role=enum_of(proto.role, ROLES, f"{path}.role"),
        incarnation=Incarnation(text(proto.incarnation, f"{path}.incarnation")),
        pid=at_least(proto.pid, 1, f"{path}.pid"),
        address=text(proto.address, f"{path}.address"),
        model=model_from_proto(proto.model, f"{path}.model"),
        layout=layout_from_proto(layout, f"{path}.layouts[0]"),
        num_blocks=at_least(proto.num_blocks, 1, f"{path}.num_blocks"),
        transport=text(proto.transport, f"{path}.transport"),
        executor=text(proto.executor, f"{path}.executor"),
        max_sequences=at_least(proto.max_sequences, 1, f"{path}.max_sequences"),
        step_tokens=at_least(proto.step_tokens, 1, f"{path}.step_tokens"),
        protocol_version=at_least(proto.protocol_version, 1, f"{path}.protocol_version"),
        verify_kv=proto.verify_kv,
        prefix_cache=proto.prefix_cache,
    )


def counts_to_proto(counts: BlockCounts) -> common_pb2.BlockCounts:
    return common_pb2.BlockCounts(
        total=counts.total,
        free=counts.free,
        held=counts.held,
        cached=counts.cached,
        reserved=counts.reserved,
        quarantined=counts.quarantined,
    )


def counts_from_proto(proto: common_pb2.BlockCounts) -> BlockCounts:
    return BlockCounts(proto.total, proto.free, proto.held, proto.cached, proto.reserved, proto.quarantined)


def load_to_proto(load: Load) -> common_pb2.Load:
    return common_pb2.Load(
        blocks=counts_to_proto(load.blocks),
        running=load.running,
        waiting=load.waiting,
        queued_tokens=load.queued_tokens,
        transfers_in_flight=load.transfers_in_flight,
        tokens_per_s=load.tokens_per_s,
        draining=load.draining,
        counters=dict(load.counters),
        unwell=load.unwell,
    )


def load_from_proto(proto: common_pb2.Load, path: str = "load") -> Load:
    """Counters come back sorted by name: a proto map has no order."""
    present(proto, "blocks", path)
    return Load(
        blocks=counts_from_proto(proto.blocks),
        running=proto.running,
        waiting=proto.waiting,
        queued_tokens=proto.queued_tokens,
        transfers_in_flight=proto.transfers_in_flight,
        tokens_per_s=number(proto.tokens_per_s, f"{path}.tokens_per_s"),
        draining=proto.draining,
        counters=tuple(sorted(proto.counters.items())),
        unwell=proto.unwell,
    )
