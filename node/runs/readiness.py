"""Decides when a stage's process is loaded ahead of a request.

Loading torch takes two seconds of a processor, on a busy machine twenty by the clock, and the first step of a
run waits for it, as do all others where a stage moves. So one process is loaded as soon as a stage is likely
here: with the lease of a slot, while the graph and the data travel; where this node is a run's witness, or
has a stage of a service and another slot; and on a machine that has offered a free slot for a while and was
idle. It takes memory, so all but the first need enough of it, and none is loaded where the owner says no
(`spare_process = false`).

A member of a column in local mode, which may have to stand in for another, keeps one as a witness does.

Not here: the process (`node.stages.program`), which has read nothing of any run until a stage takes it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import psutil
import trio

from node.placement.admission import Machine
from node.seams import Seams
from node.services.measurements import Measurements

EXPECTED_SECONDS = 30.0
"""The least time that a process loaded for an expected stage waits. A lease that is not used is often
followed by another."""


@dataclass(frozen=True)
class SpareSettings:
    """When a process waits for a stage. Raises ValueError where the settings contradict each other."""

    idle_seconds: float = 20.0
    """The idle time before a node loads a process without any request: one that was just started, or is
    between two runs, needs its processor for other things. 20."""

    look_seconds: float = 5.0
    """How often the machine is looked at. 5."""

    free_bytes_min: int = 2 << 30
    """The memory that must be available before a process is loaded without a request, of which it takes
    0.2 GB. At least `free_bytes_left_min`. 2 GiB."""

    free_bytes_left_min: int = 1 << 30
    """The memory that must be left for it to stay. 1 GiB."""

    def __post_init__(self) -> None:
        bounds = (
            (self.idle_seconds >= 0, "idle at least 0"),
            (self.look_seconds > 0, "look above 0"),
            (0 <= self.free_bytes_left_min <= self.free_bytes_min, "what is left at most what is free"),
        )
        for holds, rule in bounds:
            if not holds:
                raise ValueError(f"settings of spare processes: {rule}")


class ReadinessMember(Protocol):
    """The attributes of a run's member that this file uses."""

    @property
    def is_witness(self) -> bool: ...


class SlotHolders(Protocol):
    """The part of `node.runs.occupancy.Occupancy` that this file uses."""

    beside: Callable[[], Mapping[bytes, bytes]]


class ReadinessService(Protocol):
    """The part of `node.runs.runs.Runs` that this file uses."""

    seams: Seams
    measurements: Measurements

    @property
    def machine(self) -> Machine: ...

    @property
    def has_slot(self) -> bool: ...

    @property
    def occupancy(self) -> SlotHolders: ...


class Readiness:
    """The readiness of one node. Call `look` when its part in runs changes, `expect` when a stage is coming,
    and `over` when a run is over."""

    def __init__(
        self,
        service: ReadinessService,
        members: Callable[[], Iterable[ReadinessMember]],
        settings: SpareSettings | None = None,
    ) -> None:
        self._settings = settings or SpareSettings()
        self._service = service
        self._members = members
        self._is_allowed: Callable[[], bool] = lambda: True
        self._held_bytes: Callable[[], int] = lambda: 0
        self._expected_until = self._idle_since = float("-inf")
        self._is_watching = False
        self._is_kept_idle = False
        self._has_memory = True

    async def run(
        self,
        is_allowed: Callable[[], bool],
        held_bytes: Callable[[], int],
        free_bytes: Callable[[], int] = lambda: psutil.virtual_memory().available,
    ) -> None:
        """Look at the machine now and then, until cancelled: whether its owner allows a process to wait, and
        whether there is room for it. `held_bytes` is the memory of the waiting process, 0 for none;
        `free_bytes` reads what is available."""
        self._is_allowed, self._held_bytes = is_allowed, held_bytes
        self._idle_since, settings = self._now, self._settings
        while True:
            await trio.sleep(self._settings.look_seconds)
            free = await self._service.seams.executor.run(free_bytes)
            self._has_memory = free >= (
                settings.free_bytes_left_min if held_bytes() else settings.free_bytes_min
            )
            if self._service.measurements.is_busy or not self._service.has_slot:
                self._idle_since = self._now
            is_idle = self._now - self._idle_since >= settings.idle_seconds
            # While the node feeds a run, or a program trains, one that waits costs nothing but its memory.
            self._is_kept_idle = is_idle or (self._is_kept_idle and held_bytes() > 0)
            self.look()

    def expect(self) -> None:
        """Load a process for a stage that will soon be opened here."""
        self._expected_until = self._now + EXPECTED_SECONDS
        self._keep()

    def stand_by(self) -> None:
        """Load a process for another stage of a run, which this node may be asked for at any time, where
        there is memory and its owner allows it."""
        if self._has_memory and self._is_allowed():
            self._keep()

    def over(self) -> None:
        """Expect no further stage of a run that is over here."""
        self._expected_until = float("-inf")
        self.look()

    def look(self) -> None:
        """Keep a process, or none, by the present knowledge."""
        if self._now < self._expected_until:
            return  # what loads is about to be taken
        may_stay = self._has_memory and self._is_allowed()
        if may_stay and not self._service.has_slot:
            return  # the stage in the slot takes the waiting process as soon as it is opened
        if may_stay and self._is_likely:
            self._keep()
        else:
            self._service.seams.executor.keep_stage_ready(None)

    @property
    def _now(self) -> float:
        return self._service.seams.clock.monotonic()

    @property
    def _is_likely(self) -> bool:
        """Return whether a stage is likely: a witness is the first to be asked for a dead member's stage,
        which must open at once; a member of a service is asked for another stage while answers wait for
        it."""
        is_asked_first = bool(self._service.occupancy.beside()) or any(
            member.is_witness for member in self._members()
        )
        return self._is_kept_idle or is_asked_first

    def _keep(self) -> None:
        machine = self._service.machine
        self._service.seams.executor.keep_stage_ready((machine.threads, machine.device))

    @property
    def document(self) -> Mapping[str, Any]:
        """Return the waiting process, for people."""
        return {"is_allowed": self._is_allowed(), "memory_bytes": self._held_bytes()}
