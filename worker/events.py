"""What the engine thread is told and what it wants done: the values between a role's core and the world around it.

Nothing here knows sockets, threads or clocks. Sessions, links and transports only ever post events; the core answers
with actions, and the shell carries them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.plan import Plan, Result
from kvrelay.blocks import BlockList
from kvrelay.link import ToDecode, ToPrefill
from kvrelay.requests import Incarnation, SessionId, WorkerId
from kvrelay.session import Command, Load, Report
from kvtransfer.actions import ExitProcess, Expect, Post, Reply, Send, Unexpect
from kvtransfer.transports.base import TransportEvent
from worker.step_notes import StepTimes

# Events: the world -> core


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """steps: it wants to hear of each step."""

    session: SessionId
    coordinator_id: str
    steps: bool = False


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """The session's end is an abort for everything that was opened through it. May come twice."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class CommandReceived:
    session: SessionId
    command: Command


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """This process was told to go: as the command Drain, from nobody's session."""

    grace_s: float


@dataclass(frozen=True, slots=True)
class BlocksAsked:
    """Somebody wants to know everything that is cached; the answer, BlocksListed, names the token."""

    token: int


@dataclass(frozen=True, slots=True)
class LinkOpened:
    """Both sides have greeted each other."""

    peer: Incarnation


@dataclass(frozen=True, slots=True)
class FromPrefill:
    """A message over a prefill worker's link (decode side), after its hello."""

    writer: Incarnation
    message: ToDecode


@dataclass(frozen=True, slots=True)
class FromDecode:
    """A message over the link to a decode worker (prefill side), after its welcome."""

    peer: Incarnation
    message: ToPrefill


@dataclass(frozen=True, slots=True)
class LinkClosed:
    """by_kernel: the peer's kernel closed the connection (end of file or reset), so its process holds it no more.

    peer_dead: a dial was refused, or another incarnation answered; an address must be the worker's own for that.
    """

    peer: Incarnation
    by_kernel: bool
    reason: str = ""
    peer_dead: bool = False


@dataclass(frozen=True, slots=True)
class TransportHappened:
    event: TransportEvent


Event = (
    SessionOpened
    | SessionClosed
    | CommandReceived
    | DrainAsked
    | BlocksAsked
    | LinkOpened
    | FromPrefill
    | FromDecode
    | LinkClosed
    | TransportHappened
)


# Actions: core -> the world


@dataclass(frozen=True, slots=True)
class SendReport:
    session: SessionId
    report: Report


@dataclass(frozen=True, slots=True)
class OpenLink:
    """Make sure that there is a link to this decode worker, dialling it if need be."""

    peer: Incarnation
    worker_id: WorkerId
    address: str


@dataclass(frozen=True, slots=True)
class DropPeer:
    """No hand-off to this decode worker is left and its link is gone: let go of what the transport holds of it."""

    peer: Incarnation


@dataclass(frozen=True, slots=True)
class Leave:
    """The worker takes nothing new any more: tell every coordinator, and end within grace_s (see worker.drain)."""

    grace_s: float


@dataclass(frozen=True, slots=True)
class BlocksListed:
    """The answer to BlocksAsked."""

    token: int
    blocks: BlockList


Action = SendReport | OpenLink | DropPeer | Leave | BlocksListed | Reply | Send | Post | Expect | Unexpect | ExitProcess


class Core(Protocol):
    """One role's life on the engine thread. Everything it owns is touched by that thread alone."""

    def handle(self, event: Event, now: float) -> None:
        """Take one event in. What follows from it is collected for `actions`."""
        ...

    def schedule(self, now: float) -> Plan | None: ...

    def apply(self, plan: Plan, result: Result, now: float) -> None: ...

    def stepped(self, plan: Plan, times: StepTimes) -> None:
        """What the step just applied took; it goes up with the next actions."""
        ...

    def actions(self, now: float) -> list[Action]:
        """Run the timers that are due, then all there is to do since the last call; at most one report a session."""
        ...

    def next_wake(self) -> float | None:
        """When a timer of the core is due next."""
        ...

    def load(self, now: float) -> Load: ...

    def stuck_s(self, now: float) -> float:
        """How long nothing has moved, neither a token nor a block, although there is something to compute."""
        ...
