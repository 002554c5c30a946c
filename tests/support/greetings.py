"""What two workers say of themselves: the greetings of a link, and the description of a small decode worker."""

from __future__ import annotations

from kvrelay.blocks import KVLayout
from kvrelay.link import LinkHello, LinkWelcome, PoolDescriptor
from kvrelay.requests import Incarnation, Role, WorkerId
from kvrelay.session import ModelIdentity, WorkerDescription

P, D = Incarnation("pp"), Incarnation("dd")
LAYOUT = KVLayout(kv_heads=1, layers=2, block_size=16, head_dim=8, dtype="uint8")
HELLO = LinkHello(WorkerId("p"), P, D, "fp", LAYOUT, "grpc")
WELCOME = LinkWelcome(WorkerId("d"), D, LAYOUT, "grpc", PoolDescriptor(4096, LAYOUT.block_bytes, 8))
DECODE = WorkerDescription(
    WorkerId("d"),
    Role.DECODE,
    D,
    1,
    "127.0.0.1:1",
    ModelIdentity("m", "fp", 258, 100),
    KVLayout(1, 1, 16, 8, "uint8"),
    8,
    "grpc",
    "hash",
    4,
    64,
)
