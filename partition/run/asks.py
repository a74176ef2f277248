"""Requests of a run's member to other nodes, answered once or not at all.

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
"""Limit of an announced wait, which is an estimate of a queue; longer ones are omitted."""


@dataclass(frozen=True)
class HoldStage:
    """Proposer to a provider: hold a slot for `stage` of `plan`, the successor by `change`; None for a
    witness, which needs no slot."""

    plan: Plan
    change: Change
    stage: int | None


@dataclass(frozen=True)
class OpenStage:
    """Proposer to a newcomer that holds a slot: open the stage, since `plan` may soon be decided."""

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
    """Committer to a member: the run is over. `plan` is the hash of the plan in force, `weights` the hash of
    the result in hex, empty without a result."""

    plan: bytes
    outcome: str
    detail: str
    weights: str = ""


@dataclass(frozen=True)
class KeepStage:
    """Committer to a keeper: hold a copy of a stage after `step` steps, which `saver` has; `state` describes
    it."""

    plan: Plan
    step: int
    stage: int
    state: object
    saver: PeerId


@dataclass(frozen=True)
class NameCheckpoint:
    """Committer to a keeper: what it holds of this step is part of the checkpoint of this name."""

    plan: Plan
    step: int
    name: bytes


@dataclass(frozen=True)
class HandOverStage:
    """Committer to a replica: hand over the parameters of its stage, as the result of the run under `plan`.
    Done once the driver has them."""

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
    this run may have one, if known. `is_busy`: too many peers fetch at once; a later request may succeed.
    `is_contested`: a slot is free, and others may ask for it until then."""

    reason: Reason
    wait_seconds: Annotated[int, msgspec.Meta(ge=0, le=WAIT_SECONDS_MAX)] | None = None
    is_busy: bool = False
    is_contested: bool = False


@dataclass(frozen=True)
class Unanswered:
    """There was no answer, and why. Only SWIM decides whether the peer is dead."""

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
    """Outgoing requests, in order; a driver empties it."""

    def __init__(self) -> None:
        self._numbers = iter(range(1, 2**63))
        self._new: list[Ask] = []

    def put(self, peer: PeerId, request: Request, seconds: float) -> int:
        """Queue `request` to `peer`; return the number of its answer."""
        ask = Ask(next(self._numbers), peer, request, seconds)
        self._new.append(ask)
        return ask.number

    def take(self) -> Iterator[Ask]:
        """Yield the queued requests, each once; also those added meanwhile."""
        while self._new:
            yield self._new.pop(0)
