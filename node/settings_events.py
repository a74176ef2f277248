"""What happens to the settings of a node that follows a key (`node.following`)."""

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
