"""Drives a member's courses in local mode under trio. A course is a coroutine that yields deeds
(`partition.run.local.courses`)."""

from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any, TypeVar

import trio

from node.errors import StageFailed
from partition.run.local.courses import ColumnBroken, Course, Sleep, StageLost

R = TypeVar("R")


async def follow(course: Course[R], do: Callable[[Any], Awaitable[Any]]) -> R:
    """Follow a course to its end, and carry out each deed with `do`; return the course's result. Raises
    ColumnBroken, StageFailed, and whatever `do` raises."""
    answer: Any = None
    broken: ColumnBroken | None = None
    with closing(course):
        while True:
            try:
                deed = course.send(answer) if broken is None else course.throw(broken)
            except StopIteration as over:
                result: R = over.value
                return result
            except StageLost as lost:
                raise StageFailed(str(lost)) from None
            answer = broken = None
            if isinstance(deed, Sleep):
                await trio.sleep(deed.seconds)
                continue
            try:
                answer = await do(deed)
            except ColumnBroken as error:
                broken = error
