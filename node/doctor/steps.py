"""Runs checks one after the other, each with a time limit and a remedy. The checks are in `local_checks` and
`remote_checks`."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import trio

from node.errors import PeerloomError

T = TypeVar("T")
STEP_SECONDS = 8.0
"""Time limit for one check. On a healthy machine it takes milliseconds, so a check that takes longer has
found a fault."""

Outcome = Literal["ok", "failed", "skipped"]


@dataclass(frozen=True)
class CheckStep:
    """The outcome of one check. `remedy` is advice for a failure."""

    name: str
    outcome: Outcome
    detail: str
    remedy: str = ""
    seconds: float = 0.0

    @property
    def document(self) -> dict[str, Any]:
        """Return the step in the form for `--json`."""
        return {
            "name": self.name,
            "outcome": self.outcome,
            "detail": self.detail,
            "remedy": self.remedy,
            "seconds": round(self.seconds, 6),
        }


class Skipped(Exception):
    """The check does not apply here; the message says why."""


class Steps:
    """Runs checks and keeps their outcomes. `report` is called with each outcome immediately."""

    def __init__(self, report: Callable[[CheckStep], None]) -> None:
        self._report = report
        self.all: list[CheckStep] = []

    @property
    def failed(self) -> list[CheckStep]:
        return [step for step in self.all if step.outcome == "failed"]

    async def check(
        self, name: str, look: Callable[[], Awaitable[str]], *, seconds: float = STEP_SECONDS
    ) -> bool:
        """Run a check and return whether it passed. `look` returns a text if it passes. It raises `Skipped`,
        or PeerloomError or OSError for a failure."""
        begun = time.monotonic()
        outcome: Outcome = "failed"
        detail, remedy = f"no end within {seconds:g} s", "repeat the command to see whether it lasts"
        with trio.move_on_after(seconds):
            try:
                outcome, detail, remedy = "ok", await look(), ""
            except Skipped as why:
                outcome, detail, remedy = "skipped", str(why), ""
            except PeerloomError as error:
                outcome, detail, remedy = "failed", error.what, error.do or ""
            except OSError as error:
                outcome, detail, remedy = "failed", (error.strerror or str(error)).lower(), ""
        step = CheckStep(name, outcome, detail, remedy, time.monotonic() - begun)
        self.all.append(step)
        self._report(step)
        return outcome == "ok"


async def in_thread(look: Callable[[], T]) -> T:
    """Run a blocking function in a thread, so that the time limit also applies to a hanging disk."""
    return await trio.to_thread.run_sync(look, abandon_on_cancel=True)
