"""Members that want to leave a run: they go between two steps, and the last replica of a stage is replaced
before it goes."""

from crypto.identity import PeerId
from partition.run.proposals import Proposer


class Draining:
    """As one member knows of them; its `proposer` finds replacements."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer

    def note(self, now: float, peer: PeerId) -> None:
        """Take it that this member wants to leave."""
        self._proposer.leaving.add(peer)
        self._proposer.changed(now)

    def ready(self) -> list[PeerId]:
        """Return those that take nothing with them between two steps: for them a committer pauses."""
        return [peer for peer in sorted(self._proposer.leaving) if self._proposer.can_leave(peer)]
