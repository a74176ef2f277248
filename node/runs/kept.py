"""The guests' disk budget for runs: protects needed blobs, and reports runs whose result was evicted."""

from collections.abc import Callable, Iterable
from typing import Protocol

from node.content.graphs import graph_label
from node.events import Event
from node.protocols.manifest import Run
from node.result_events import ResultEvicted
from node.runs.archive import ArchiveShell
from node.seams import Seams
from node.storage.guests import Guests


class KeptRunsService(Protocol):
    """The attributes of `node.runs.runs.Runs` that this file uses."""

    seams: Seams
    guests: Guests
    archive: ArchiveShell
    publish: Callable[[Event], None]


def note_guests(runs: KeptRunsService, going: Iterable[Run], graphs: Iterable[bytes]) -> None:
    """Protect the blobs that these runs and graphs need, and report evicted results."""
    data = [label for run in going for label in (run.manifest.data, f"{run.text}.state")]
    runs.guests.needed = frozenset([*map(graph_label, graphs), *data])
    while runs.guests.evicted:
        run = runs.guests.evicted.popleft()
        if runs.archive.has_result(run):
            runs.archive.evict(run)
            runs.publish(ResultEvicted(at=runs.seams.clock.wall(), run=run))
