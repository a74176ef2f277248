"""Courses: what follows what in a member's life in local mode, as generators of deeds, one at a time.

A course yields a deed, and is sent what came of it; one that waits yields `Sleep`. A driver does the deeds of
its node, or of its simulated peer, and decides nothing. It throws `ColumnBroken` into the course where a deed
comes to that; any other error ends the course.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

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
