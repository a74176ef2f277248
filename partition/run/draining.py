"""Members that want to leave a run. They leave between two steps, and the last replica of a stage is replaced
before it leaves."""

from crypto.identity import PeerId
from partition.run.proposals import Proposer


class Draining:
    """The leaving members, as one member knows them. Its `proposer` finds replacements."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer

    def note(self, now: float, peer: PeerId) -> None:
        """Note that this member wants to leave."""
        self._proposer.leaving.add(peer)
        self._proposer.changed(now)

    def ready(self) -> list[PeerId]:
        """Return the members that can leave between two steps without loss. The committer pauses for them."""
        return [peer for peer in sorted(self._proposer.leaving) if self._proposer.can_leave(peer)]
