"""Courses: the procedures of a member in local mode, written as generators that yield one deed (action) at a
time.

A course yields a deed and is sent the outcome; to wait, it yields `Sleep`. A driver carries out the deeds for
its node or simulated peer, and decides nothing. If a deed fails because a stage lost its holder, the driver
throws `ColumnBroken` into the course; any other error ends the course.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from crypto.identity import PeerId

R = TypeVar("R")
Course = Generator[object, Any, R]
"""A course with the result R. Its deeds are frozen dataclasses; the docstring of each states the answer that
it gets."""


class ColumnBroken(Exception):
    """A stage of the column has lost its holder."""


class StageLost(Exception):
    """A stage cannot continue on this node."""


@dataclass(frozen=True)
class Sleep:
    """Continue after this many seconds. No answer."""

    seconds: float


@dataclass(frozen=True)
class AttachTo:
    """Ask a peer to work for this head with a stage. The answer is whether it does."""

    stage: int
    peer: PeerId


@dataclass(frozen=True)
class AskToHold:
    """Ask a node, possibly this one, to hold a stage; if `is_beside`, in addition to the stage that it holds.
    The answer is whether it will; None if no answer came."""

    stage: int
    peer: PeerId
    is_beside: bool = False


@dataclass(frozen=True)
class CallHeads:
    """Announce this holder to members, and to `companions`, which worked for its previous head. No answer."""

    companions: tuple[PeerId, ...]
