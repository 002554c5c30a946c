"""What a known fault is: edits of this tree's code that put it back in. Values only.

A fault that two places guard against is put back in both: with one guard left nothing would be wrong.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    """Replace `old`, which occurs once in the file at `path` (relative to the tree's root), by `new`."""

    path: str
    old: str
    new: str


@dataclass(frozen=True)
class Fault:
    """what: the fault in words, as a finding would state it."""

    name: str
    what: str
    edits: tuple[Edit, ...]


def one_edit(name: str, what: str, path: str, old: str, new: str) -> Fault:
    return Fault(name, what, (Edit(path, old, new),))
