"""Victims and a hostile member of their swarm, each in a process of its own, with measurements.

One of the four victims requests honest runs, whose results are compared. Another is left to the hostile peer,
which draws it into its own runs as often as it can. Every process started here is ended in any case.
"""

import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import safetensors.numpy

from crypto.encoding import encode
from node.protocols.manifest import Manifest
from tests.hostile.insider_process import be_insider
from tests.hostile.loop_steps import Step
from tests.hostile.scene import READY_SECONDS, Far, start
from tests.hostile.watched import NOT_PLACED, be_watched, log_of
from tests.stack import Model, Tensors, manifest

NAMES = ("a", "b", "c", "d")
REQUESTER, IDLE = "a", "d"
LOOK_SECONDS = 0.5
"""Seconds between two measurements of the victims."""
HONEST_SECONDS_MAX = 180.0
"""Seconds allowed for one honest run on a busy machine."""


def member_run() -> Manifest:
    """Return an honest run that takes some seconds, in two stages."""
    return manifest(
        steps=4, microbatch=8, microbatches=8, test_samples=32, stages=2, replicas=1, save_every=2
    )


@dataclass
class Found:
    """The outcome, by victim.

    `grown_bytes` is the largest growth of a victim's own process, `failures` are the failures that its node
    contained, and `logs` contain their tracebacks. `outcomes` and `results` are the ends and the weights of
    the honest runs; `put_off` counts how often such a run found no slots and was requested again.
    """

    seconds: float = 0.0
    grown_bytes: dict[str, int] = field(default_factory=dict)
    disk_bytes: dict[str, int] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    longest: dict[str, list[Step]] = field(default_factory=dict)
    failures: dict[str, dict[str, int]] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)
    refused: dict[str, dict[str, int]] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)
    outcomes: list[str] = field(default_factory=list)
    results: list[Tensors] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    put_off: int = 0

    def note(self, trained: Mapping[str, Any]) -> None:
        """Record the end of an honest run."""
        self.outcomes.append(f"{trained['outcome']} {trained['detail']}".strip())
        if trained["weights"] is not None:
            self.results.append(safetensors.numpy.load(trained["weights"]))

    @property
    def longest_step(self) -> Step | None:
        """Return the longest step of all victims, by processor time."""
        steps = [step for longest in self.longest.values() for step in longest]
        return max(steps, key=lambda step: step.cpu_seconds, default=None)


class MemberScene:
    """Made by `member_scene`; can be played once."""

    def __init__(self, stack: ExitStack, model: Model, wanted: Manifest, seed: int) -> None:
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._wanted, self._model, self._runs = wanted, model, 0
        self._victims: dict[str, Far] = {}
        self._peers: dict[str, bytes] = {}
        join: str | None = None
        for name in NAMES:
            self._victims[name] = start(stack, f"victim {name}", be_watched, self._folder / name, name, join)
            address, self._peers[name] = self._victims[name].hear()
            join = join or address
        assert join is not None
        self._insider = start(
            stack, "insider", be_insider, self._folder / "m", join, seed, encode(wanted), model.data
        )
        self._insider.hear()
        self._wait_until_met()

    def _wait_until_met(self) -> None:
        until = time.monotonic() + READY_SECONDS
        while any(victim.ask("figures")["live"] <= len(NAMES) for victim in self._victims.values()):
            assert time.monotonic() < until, "the members have not found each other"

    def play(self, seconds: float) -> Found:
        """Let the hostile peer send for this long, and until the last honest run that began in this time has
        ended."""
        found, pause = Found(), threading.Event()
        before = {name: self._figures(name) for name in NAMES}
        self._insider.ask(("speak", list(self._peers.values()), self._peers[IDLE]))
        begun = run_begun = time.monotonic()
        self._begin_run()
        while True:
            pause.wait(LOOK_SECONDS)
            now = time.monotonic()
            for name in NAMES:
                self._look(name, before[name], found)
            if found.ended:
                break
            self._tell_what_is_known()
            trained = self._victims[REQUESTER].ask("trained")
            if trained is not None and trained["outcome"] == NOT_PLACED:
                found.put_off += 1
                self._begin_run()  # the hostile peer's own runs occupy the slots for a while
            elif trained is not None:
                found.note(trained)
                if now - begun >= seconds:
                    break
                run_begun = now
                self._begin_run()
            elif now - run_begun > HONEST_SECONDS_MAX:
                events = "\n".join(self._victims[REQUESTER].ask("told"))
                found.unfinished.append(f"not over after {HONEST_SECONDS_MAX:.0f} s:\n{events}")
                break
        found.seconds = time.monotonic() - begun
        found.sent = self._insider.ask("sent")
        for name in NAMES:
            if log := log_of(self._folder / name):
                found.logs[name] = log
        return found

    def _figures(self, name: str) -> dict[str, Any]:
        figures: dict[str, Any] = self._victims[name].ask("figures")
        return figures

    def _look(self, name: str, before: Mapping[str, Any], found: Found) -> None:
        try:
            figures = self._figures(name)
        except (AssertionError, OSError) as error:
            found.ended.append(f"{name}: {error}")
            return
        grown = figures["rss_bytes"] - before["rss_bytes"]
        found.grown_bytes[name] = max(found.grown_bytes.get(name, 0), grown)
        found.disk_bytes[name] = max(found.disk_bytes.get(name, 0), figures["disk_bytes"])
        found.steps[name] = figures["steps"] - before["steps"]
        found.longest[name] = figures["longest"]
        found.failures[name] = figures["failures"]
        found.refused[name] = dict(Counter(figures["counters"]) - Counter(before["counters"]))

    def _begin_run(self) -> None:
        self._runs += 1  # a repetition of the same run would be over already
        wanted = msgspec.structs.replace(self._wanted, created_milliseconds=self._runs)
        self._victims[REQUESTER].ask(("train", encode(wanted), self._model.data))

    def _tell_what_is_known(self) -> None:
        for victim in self._victims.values():
            known = victim.ask("heard")
            self._insider.ask(("hear", known["messages"], known["runs"]))


@contextmanager
def member_scene(model: Model, wanted: Manifest, seed: int = 1) -> Iterator[MemberScene]:
    """Yield a scene, and end all its processes afterwards. `wanted` selects honest runs, the hostile peer's
    own runs, or both."""
    with ExitStack() as stack:
        yield MemberScene(stack, model, wanted, seed)
