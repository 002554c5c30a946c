"""Token ids in little room, for values that hold a hundred thousand of them. Knows no numpy, which reads them as is."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

CODE: Final = "I"
"""Of array and struct: four bytes, in this machine's order; numpy's uint32."""


@dataclass(frozen=True, slots=True, repr=False)
class TokenIds:
    """Ids one after another, as compared and printed; made, copied and read at the speed of memory."""

    packed: bytes = b""

    @classmethod
    def of(cls, token_ids: Iterable[int]) -> TokenIds:
        return cls(array(CODE, iter(token_ids)).tobytes())

    def after(self, start: int) -> list[int]:
        """Those from position `start` on."""
        ids = memoryview(self.packed).cast(CODE)
        return ids[start:].tolist()

    def __len__(self) -> int:
        return len(self.packed) // 4

    def __iter__(self) -> Iterator[int]:
        return iter(self.after(0))

    def __repr__(self) -> str:
        return f"TokenIds.of({self.after(0)})"
