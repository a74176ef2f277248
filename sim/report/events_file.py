"""events.jsonl: one line per event, written as it happens, up to a limit.

The first line describes the file. Most events report that peers become known to each other, which readers
seldom look for. So these kinds may fill at most half of the limit; the summary counts the events that were
left out.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from dht.events import NodesFound, PeerHeard
from gossip.member import MemberChanged, MemberUp
from sim.observers import Observation, World
from sim.report.documents import ShortNames, event_document

SCHEMA = "peerloom.sim.events/1"
EVENTS_MAX = 200_000
"""Default maximum number of lines: some 30 MB."""
_PLENTY = (MemberUp, MemberChanged, PeerHeard, NodesFound)


class EventsFile:
    """A `sim.observers.Watcher` that writes the file. Call `close` at the end."""

    def __init__(self, path: Path, *, scenario: str, seed: int, events_max: int = EVENTS_MAX) -> None:
        self.left_out: Counter[str] = Counter()
        self._file = path.open("wb")
        self._encode = msgspec.json.Encoder().encode
        self._left = events_max
        self._plenty_left = events_max // 2
        self._names: ShortNames | None = None
        self._write({"schema": SCHEMA, "scenario": scenario, "seed": seed})

    def see(self, observed: Observation, world: World) -> None:
        plenty = isinstance(observed.event, _PLENTY)
        if not self._left or (plenty and not self._plenty_left):
            self.left_out[type(observed.event).__name__] += 1
            return
        self._left -= 1
        self._plenty_left -= plenty
        self._write(event_document(observed, self._named(world)))

    def sample(self, world: World) -> None:  # noqa: ARG002 - a watcher's shape
        """Flush the file, so that a reader can follow a long experiment."""
        self._file.flush()

    def end(self, world: World) -> None:
        """Do nothing."""

    def close(self) -> None:
        self._file.close()

    def _named(self, world: World) -> ShortNames:
        if self._names is None:
            self._names = names_of(world)
        return self._names

    def _write(self, document: dict[str, Any]) -> None:
        self._file.write(self._encode(document) + b"\n")


def names_of(world: World) -> ShortNames:
    """Return the names that a world gives its peers."""
    return ShortNames(world.name, {peer: number for number, peer in enumerate(world.peers)})
