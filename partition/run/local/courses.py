"""Courses: sequences of deeds in a member's life in local mode, as generators that yield one deed at a time.

A course yields a deed and is sent its outcome; to wait, it yields `Sleep`. A driver carries out the deeds for
its node or simulated peer, and decides nothing. It throws `ColumnBroken` into the course if a deed fails that
way; any other error ends the course.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from crypto.identity import PeerId

R = TypeVar("R")
Course = Generator[object, Any, R]
"""A course with the result R. Its deeds are frozen dataclasses; each says what its answer is."""


class ColumnBroken(Exception):
    """A stage of the column has lost its holder."""


class StageLost(Exception):
    """A stage cannot go on here."""


@dataclass(frozen=True)
class Sleep:
    """Continue after some seconds. No answer."""

    seconds: float


@dataclass(frozen=True)
class CatchUp:
    """Take over a state of others. No answer. StageLost: it `is_needed`, and no peer hands one over."""

    is_needed: bool = True


@dataclass(frozen=True)
class AttachTo:
    """Ask a peer to hold a stage of this head's column. The answer says whether it does."""

    stage: int
    peer: PeerId


@dataclass(frozen=True)
class AskToHold:
    """Ask a node, possibly this one, to hold a stage; with `is_beside` in addition to its own. The answer
    says whether it will."""

    stage: int
    peer: PeerId
    is_beside: bool = False


@dataclass(frozen=True)
class CallHeads:
    """Announce this holder to members, and to these peers, which worked for its last head. No answer."""

    companions: tuple[PeerId, ...]
