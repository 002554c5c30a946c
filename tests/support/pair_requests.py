"""What a coordinator knows of one request of a pair of cores: tokens of each sequence, what was told, how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.blocks import Ticket
from kvrelay.session import ComputeRecord, Ended, Pushed, Refused, TokenOut, Work


@dataclass
class Request:
    """said[s]: tokens of sequence s. endings: of each Ended, which sequence and why, in order."""

    work: Work
    local: bool = False
    said: list[list[int]] = field(default_factory=list)
    ticket: Ticket | None = None
    started: bool = False
    ended: Ended | None = None
    endings: list[tuple[int, str]] = field(default_factory=list)
    refused: Refused | None = None
    landed: bool = False
    pushed: Pushed | None = None
    records: list[ComputeRecord] = field(default_factory=list)
    aborted: bool = False
    dropped: set[int] = field(default_factory=set)
    """Sequences given up one by one."""

    def __post_init__(self) -> None:
        self.said = [[] for _ in range(self.work.n)]

    @property
    def tokens(self) -> list[int]:
        """Of sequence 0."""
        return self.said[0]

    @property
    def num_cached_tokens(self) -> int:
        """Of the one record that there must be."""
        (record,) = self.records
        return record.num_cached_tokens

    def is_over(self, sequence: int) -> bool:
        """Whether its last token ends it, or it was given up."""
        said, stop = self.said[sequence], self.work.stop
        return sequence in self.dropped or (bool(said) and stop.finish_of(len(said) - 1, said[-1]) is not None)

    @property
    def is_done(self) -> bool:
        return bool(self.ended or self.refused or self.aborted or self.is_given_up)

    @property
    def is_given_up(self) -> bool:
        """No Ended is to come: the sequence that was left was given up."""
        return bool(self.dropped) and all(map(self.is_over, range(self.work.n)))

    def token(self, out: TokenOut) -> None:
        said = self.said[out.sequence]
        assert out.index == len(said), f"index {out.index} after {len(said)} tokens of sequence {out.sequence}"
        said.append(out.token_id)

    def end(self, ended: Ended) -> None:
        """The request has ended with the Ended of its last sequence, or with the first failure."""
        self.endings.append((ended.sequence, ended.reason))
        if ended.reason == "failed" or all(map(self.is_over, range(self.work.n))):
            self.ended = ended
