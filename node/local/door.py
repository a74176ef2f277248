"""Who may take part in a run in local mode, for the averaging service and for whoever asks nodes to join."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from crypto.facts import Fact
from crypto.identity import PeerId
from node.seams import Clock
from partition.run.admission import Admission


@dataclass(frozen=True)
class Door:
    """The `Gate` of one run. `show` shows peers this member's own chain of tickets, and asks for theirs."""

    admission: Admission
    clock: Clock
    show: Callable[[Collection[PeerId]], None]

    def admits(self, peer: PeerId) -> bool:
        """Return whether a peer is known to be a member."""
        return self.admission.admits(peer)

    def seen(self, peer: PeerId) -> None:
        """A peer claims to be a member."""
        self.show([peer])

    def chain_for(self, peer: PeerId) -> tuple[Fact, ...] | None:
        """Return the tickets by which a peer that is asked would be a member; None: this one cannot ask."""
        return self.admission.extended(peer, self.clock.wall()) if self.admission.can_vouch else None
