"""Decides when a stage's process is loaded ahead of a request.

Loading torch takes two seconds of CPU time, or up to twenty seconds on a busy machine. The first step of a
run waits for it, and when a stage moves, so do all other members. So one process is loaded as soon as this
node is likely to get a stage. That is the case when a slot is leased, while graph and data are fetched; if
this node is a witness of a run; if it has a stage of a service and another slot; and on a machine that has
offered a free slot and been idle for a while. The process takes memory, so in all but the first case enough
must be free. The owner can forbid it (`spare_process = false`).

In local mode, a member of a column may have to replace another member, so it keeps a process as a witness
does.

Not here: the process itself (`node.stages.program`), which reads nothing of any run until a stage takes it.
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
"""Minimum seconds that a process loaded for an expected stage is kept. After a lease that is not used,
another often follows."""


@dataclass(frozen=True)
class SpareSettings:
    """When a process waits for a stage. Raises ValueError if the settings contradict each other."""

    idle_seconds: float = 20.0
    """Idle seconds before a node loads a process without any request. A node that was just started, or is
    between two runs, needs its processor for other things. Default: 20."""

    look_seconds: float = 5.0
    """Seconds between two checks of the machine. Default: 5."""

    free_bytes_min: int = 2 << 30
    """Memory that must be available before a process, which takes 0.2 GB, is loaded without a request. At
    least `free_bytes_left_min`. Default: 2 GiB."""

    free_bytes_left_min: int = 1 << 30
    """Memory that must remain available for a loaded process to stay. Default: 1 GiB."""

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
    and `over` when a run has ended."""

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
        """Check regularly, until cancelled, whether the owner allows a process to wait, and whether there is
        memory for it. `held_bytes` returns the memory of the waiting process, 0 if there is none;
        `free_bytes` returns the available memory."""
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
            # While the node feeds a run, or a program trains, a waiting process costs nothing but its memory.
            self._is_kept_idle = is_idle or (self._is_kept_idle and held_bytes() > 0)
            self.look()

    def expect(self) -> None:
        """Load a process for a stage that will soon be opened here."""
        self._expected_until = self._now + EXPECTED_SECONDS
        self._keep()

    def stand_by(self) -> None:
        """Load a process for a stage of a run that this node may be asked for at any time, if there is memory
        and its owner allows it."""
        if self._has_memory and self._is_allowed():
            self._keep()

    def over(self) -> None:
        """Stop expecting a stage of a run that has ended here."""
        self._expected_until = float("-inf")
        self.look()

    def look(self) -> None:
        """Load, keep or end the waiting process according to the current state."""
        if self._now < self._expected_until:
            return  # a stage is about to take the process that is loading
        may_stay = self._has_memory and self._is_allowed()
        if may_stay and not self._service.has_slot:
            return  # the stage in the slot takes the waiting process as soon as it opens
        if may_stay and self._is_likely:
            self._keep()
        else:
            self._service.seams.executor.keep_stage_ready(None)

    @property
    def _now(self) -> float:
        return self._service.seams.clock.monotonic()

    @property
    def _is_likely(self) -> bool:
        """Whether this node is likely to get a stage. A witness is asked first for a dead member's stage,
        which must open quickly. A member of a service is asked for another stage while answers wait for
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
        """The waiting process, as a document for people."""
        return {"is_allowed": self._is_allowed(), "memory_bytes": self._held_bytes()}
