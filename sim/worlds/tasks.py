"""Sequential code of a peer in a world of cores: generators that wait for a time or for answers.

A task yields a `Wait` and is resumed with its result. The task of a stopped peer is closed; that of a frozen
peer continues at the thaw.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any

Resume = Callable[[Any], None]
Wait = Callable[[Resume], None]
"""Calls the given function once, with the result of the wait."""
Task = Generator[Wait, Any, Any]


class Tasks:
    """The tasks of a peer between a start and a stop. `when_awake` calls a function now, or at the thaw."""

    def __init__(self, when_awake: Callable[[Callable[[], None]], None]) -> None:
        self.is_over = False
        self._when_awake = when_awake

    def start(self, task: Task) -> None:
        """Begin a task."""
        self._go_on(task, None)

    def _go_on(self, task: Task, found: Any) -> None:
        if self.is_over:
            task.close()
            return
        try:
            wait = task.send(found)
        except StopIteration:
            return
        wait(lambda answer: self._when_awake(lambda: self._go_on(task, answer)))


def gather(waits: Sequence[Wait]) -> Wait:
    """Return a wait for all of these waits; its result is their results in order."""

    def wait(resume: Resume) -> None:
        answers: list[Any] = [None] * len(waits)
        left = len(waits)
        if not left:
            resume([])

        def note(number: int, answer: Any) -> None:
            nonlocal left
            answers[number] = answer
            left -= 1
            if not left:
                resume(answers)

        for number, each in enumerate(waits):
            each(lambda answer, number=number: note(number, answer))  # type: ignore[misc]  # bound now

    return wait
