"""The batch that one stage of a provider is computing, and the units that must be computed alone."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.serve.computing import BatchUnit, ComputeBatch
from partition.serve.messages import Carried, OpenSession, UnitWork
from partition.serve.served_session import SessionPart


@dataclass(eq=False)
class StageQueue:
    """The queue of stage `number` of `count`. A session has at most `context` tokens, and all sessions
    together have `room`."""

    service: bytes
    number: int
    count: int
    context: int
    room: int = 0
    batch: int = 0
    computing: tuple[SessionPart, ...] = ()
    units: tuple[Carried, ...] = ()
    alone: deque[bytes] = field(default_factory=deque)
    """Sessions whose next unit must be computed by itself, because a batch with it has failed."""
    began_at: float = 0.0
    call_seconds: float = 0.0
    """`began_at` is when the latest call began; `call_seconds` is how long the latest answered call took."""
    waits_until: float = -inf
    """The time until which the stage waits for a unit that is on its way."""

    def check_ends(self, door: PeerId, message: OpenSession) -> None:
        """Check that the first and the last stage of a session are next to its door. Raises
        RemoteProtocolError if not."""
        is_first, is_last = self.number == 0, self.number == self.count - 1
        if (is_first and message.before != door) or (is_last and message.after != door):
            raise RemoteProtocolError("a session's first or last stage is not next to its door")

    def next_alone(self, own: Sequence[SessionPart]) -> SessionPart | None:
        """Return the next part whose unit must be computed by itself; None if there is none."""
        while self.alone:
            name = self.alone.popleft()
            found = next((part for part in own if part.session.id == name and part.may_compute), None)
            if found is not None:
                return found
        return None

    def begin(self, now: float, batch: int, chosen: Sequence[SessionPart]) -> ComputeBatch:
        """Begin to compute the next unit of each of these parts."""
        units = []
        for part in chosen:
            part.is_computing = part.is_kept = True
            units.append(part.waiting.popleft())
        self.batch, self.began_at = batch, now
        self.computing, self.units = tuple(chosen), tuple(units)
        rows = tuple(
            BatchUnit(part.session.id, unit.message, unit.arrays)
            for part, unit in zip(chosen, units, strict=True)
            if isinstance(unit.message, UnitWork)
        )
        return ComputeBatch(self.service, self.number, batch, rows)

    def end(self) -> list[tuple[SessionPart, Carried]]:
        """End the computation in progress; return its units."""
        for part in self.computing:
            part.is_computing = False
        found = list(zip(self.computing, self.units, strict=True))
        self.computing, self.units = (), ()
        return found
