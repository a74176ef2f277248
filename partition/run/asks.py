"""Requests from a member of a run to other nodes. Each is answered at most once.

A part of the core appends an `Ask` to its `asks`. Its driver sends the request to the peer, which may be this
node itself, and passes the answer to `replied` with the ask's number. An answer that is no longer awaited is
ignored.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import msgspec

from crypto.identity import PeerId
from partition.plan.change import Change
from partition.plan.plan import Plan
from partition.run.messages import Reason

WAIT_SECONDS_MAX = 30 * 24 * 3600
"""Maximum announced wait. The wait is an estimate from a queue; longer estimates are omitted."""


@dataclass(frozen=True)
class HoldStage:
    """Proposer to a provider: hold a slot for `stage` of `plan`, which follows from `change`. `stage` is None
    for a witness, which needs no slot."""

    plan: Plan
    change: Change
    stage: int | None


@dataclass(frozen=True)
class OpenStage:
    """Proposer to a newcomer that holds a slot: open the stage already, because `plan` may soon be
    decided."""

    plan: Plan
    change: Change


@dataclass(frozen=True)
class ReleaseStage:
    """Proposer to a newcomer: `plan` was not decided."""

    plan: Plan


@dataclass(frozen=True)
class StartRun:
    """Committer to a newcomer: `plan` is in force."""

    plan: Plan


@dataclass(frozen=True)
class RenewRun:
    """Committer to a member: the run goes on under `plan`."""

    plan: Plan


@dataclass(frozen=True)
class EndRun:
    """Committer to a member: the run is over. `plan` is the hash of the plan in force. `weights` is the hash
    of the result in hex, or empty if there is no result."""

    plan: bytes
    outcome: str
    detail: str
    weights: str = ""


@dataclass(frozen=True)
class KeepStage:
    """Committer to a keeper: copy a stage's state after `step` steps from `saver`. `state` describes it."""

    plan: Plan
    step: int
    stage: int
    state: object
    saver: PeerId


@dataclass(frozen=True)
class NameCheckpoint:
    """Committer to a keeper: the copies that it holds of this step belong to the checkpoint with this
    name."""

    plan: Plan
    step: int
    name: bytes


@dataclass(frozen=True)
class HandOverStage:
    """Committer to a replica: hand over the parameters of its stage, for the result of the run under `plan`.
    The answer is Done once the committer's driver has them."""

    plan: Plan
    stage: int


Request = (
    HoldStage
    | OpenStage
    | ReleaseStage
    | StartRun
    | RenewRun
    | EndRun
    | KeepStage
    | NameCheckpoint
    | HandOverStage
)


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The request was carried out."""


class Declined(msgspec.Struct, frozen=True, tag="declined"):
    """The request is refused, with a reason to display. A provider without a free slot adds the seconds until
    this run may get one, if it can estimate them. `is_busy`: too many peers fetch at the same time, and a
    later request may succeed. `is_contested`: a slot is free, but other runs may ask for it before then."""

    reason: Reason
    wait_seconds: Annotated[int, msgspec.Meta(ge=0, le=WAIT_SECONDS_MAX)] | None = None
    is_busy: bool = False
    is_contested: bool = False


@dataclass(frozen=True)
class Unanswered:
    """The request got no answer, for this reason. Only SWIM decides whether the peer is dead."""

    reason: str


Reply = Done | Declined | Unanswered


@dataclass(frozen=True)
class Ask:
    """One request to `peer`, whose answer must come within `seconds`."""

    number: int
    peer: PeerId
    request: Request
    seconds: float


class Asks:
    """Outgoing requests, in order. The driver takes them."""

    def __init__(self) -> None:
        self._numbers = iter(range(1, 2**63))
        self._new: list[Ask] = []

    def put(self, peer: PeerId, request: Request, seconds: float) -> int:
        """Queue `request` to `peer`; return the number under which its answer is passed back."""
        ask = Ask(next(self._numbers), peer, request, seconds)
        self._new.append(ask)
        return ask.number

    def take(self) -> Iterator[Ask]:
        """Yield each queued request once, including requests added during the iteration."""
        while self._new:
            yield self._new.pop(0)
