"""Courses: what follows what in a member's life in local mode, as generators of deeds, one at a time.

A course yields a deed, and is sent what came of it; one that waits yields `Sleep`. A driver does the deeds of
its node, or of its simulated peer, and decides nothing. It throws `ColumnBroken` into the course where a deed
comes to that; any other error ends the course.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from crypto.identity import PeerId

R = TypeVar("R")
Course = Generator[object, Any, R]
"""A course whose result is R. Its deeds are frozen dataclasses; each says how it is answered."""


class ColumnBroken(Exception):
    """A stage of the column has no holder any more."""


class StageLost(Exception):
    """A stage cannot go on here."""


@dataclass(frozen=True)
class Sleep:
    """Go on after so long. No answer."""

    seconds: float


@dataclass(frozen=True)
class CatchUp:
    """Take over the state of others. No answer. StageLost: it `is_needed`, and nobody hands one over."""

    is_needed: bool = True


@dataclass(frozen=True)
class AttachTo:
    """Have a peer hold a stage of this head's column. The answer says whether it does."""

    stage: int
    peer: PeerId


@dataclass(frozen=True)
class AskToHold:
    """Ask a node, which may be this one, to hold a stage; with `is_beside` in addition to its own. The answer
    says whether it will."""

    stage: int
    peer: PeerId
    is_beside: bool = False


@dataclass(frozen=True)
class CallHeads:
    """Show members that this one is there, and these, which worked for its last head. No answer."""

    companions: tuple[PeerId, ...]
