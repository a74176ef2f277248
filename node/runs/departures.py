"""Members that want to leave a run: they go between two steps, and whoever is the last of its stage is
replaced before. Not here: how the next plan comes about (`node.runs.succession`)."""

from collections.abc import Callable

from crypto.identity import PeerId
from node.runs.committer import CommitterShell
from node.runs.succession import Succession


class Departures:
    """As one member knows of them. `committer` is its own, where it commits; `absent` is told whom the next
    plan must do without."""

    def __init__(
        self,
        succession: Succession,
        *,
        committer: Callable[[], CommitterShell | None],
        absent: Callable[[PeerId, str], None],
    ) -> None:
        self._succession = succession
        self._committer = committer
        self._absent = absent

    def note(self, peer: PeerId) -> None:
        """One wants to leave."""
        self._succession.leaving.add(peer)
        self.hand_over()
        self._succession.changed()

    def hand_over(self) -> None:
        """As the committer: pause before somebody whom its stage can do without leaves."""
        committer, succession = self._committer(), self._succession
        if committer is not None and any(succession.may_go(peer) for peer in succession.leaving):
            committer.pause()

    def paused(self, step: int) -> None:
        """No step is open: whoever wants to leave takes nothing with it now."""
        for peer in sorted(self._succession.leaving):
            if self._succession.may_go(peer):
                self._absent(peer, f"it leaves after step {step}")
