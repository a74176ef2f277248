"""Events about settings that a node follows (`node.following`), and about the goal of a run."""

from crypto.identity import PeerId
from node.events import Event


class NodeConfigured(Event, frozen=True, kw_only=True):
    """This node follows `key`, whose owner calls its settings `name`. `version` of them, taken at `since`, is
    kept to from now on; 0: none was found yet. `skipped` are settings that are not kept to, and why."""

    key: PeerId
    name: str
    version: int
    since: float
    settings: tuple[str, ...]
    skipped: tuple[str, ...]


class RunGoalSet(Event, frozen=True, kw_only=True):
    """This node's own run is to train so many `samples_per_second`, over any `seconds` of it; 0: it
    has no goal any more."""

    run: str
    samples_per_second: float
    seconds: int
