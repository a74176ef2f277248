"""What runs need of the disk's room for guests: which blobs must stay, and whose result had to go."""

from collections.abc import Callable, Iterable
from typing import Protocol

from node.content.graphs import graph_label
from node.events import Event, ResultEvicted
from node.protocols.manifest import Run
from node.runs.archive import ArchiveShell
from node.seams import Seams
from node.storage.guests import Guests


class Service(Protocol):
    """What is needed of `node.runs.runs.Runs`."""

    seams: Seams
    guests: Guests
    archive: ArchiveShell
    publish: Callable[[Event], None]


def note_guests(runs: Service, going: Iterable[Run], graphs: Iterable[bytes]) -> None:
    """Keep what these runs and graphs need, and say whose result was driven out."""
    data = [label for run in going for label in (run.manifest.data, f"{run.text}.state")]
    runs.guests.needed = frozenset([*map(graph_label, graphs), *data])
    while runs.guests.evicted:
        run = runs.guests.evicted.popleft()
        if runs.archive.has_result(run):
            runs.archive.evict(run)
            runs.publish(ResultEvicted(at=runs.seams.clock.wall(), run=run))
