"""Members that want to leave a run: they leave between two steps, and the last replica of a stage is replaced
before."""

from crypto.identity import PeerId
from partition.run.proposals import Proposer


class Draining:
    """Leaving members, as one member knows them; its `proposer` finds replacements."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer

    def note(self, now: float, peer: PeerId) -> None:
        """Note that this member wants to leave."""
        self._proposer.leaving.add(peer)
        self._proposer.changed(now)

    def ready(self) -> list[PeerId]:
        """Return the members that take nothing with them between two steps: a committer pauses for them."""
        return [peer for peer in sorted(self._proposer.leaving) if self._proposer.can_leave(peer)]
