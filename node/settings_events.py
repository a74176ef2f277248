"""Events about settings that a node follows (`node.following`), and about the throughput goal of a run."""

from crypto.identity import PeerId
from node.events import Event


class NodeConfigured(Event, frozen=True, kw_only=True):
    """This node follows `key`, whose owner named the settings `name`. `version` of them, adopted at `since`,
    is in force from now on; 0: none was found yet. `skipped` are the settings that are not applied, with
    reasons."""

    key: PeerId
    name: str
    version: int
    since: float
    settings: tuple[str, ...]
    skipped: tuple[str, ...]


class RunGoalSet(Event, frozen=True, kw_only=True):
    """The requester of a run, which is this node, wants `samples_per_second`, averaged over any `seconds` of
    the run. 0: the goal was removed."""

    run: str
    samples_per_second: float
    seconds: int
