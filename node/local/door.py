"""Admission to a run in local mode, for the averaging service and for members that ask nodes to join."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from crypto.errors import RemoteProtocolError
from crypto.facts import Fact
from crypto.identity import PeerId
from node.seams import Clock
from partition.run.admission import Admission, Present


@dataclass(frozen=True)
class Door:
    """The `Gate` of one run. `show` shows this member's own chain of tickets to peers that are not known to
    be members, and asks for theirs; `greet` shows it to members too."""

    admission: Admission
    clock: Clock
    show: Callable[[Collection[PeerId]], None]
    greet: Callable[[Collection[PeerId]], None] = lambda _: None

    def admits(self, peer: PeerId) -> bool:
        """Return whether a peer is known to be a member."""
        return self.admission.admits(peer)

    def seen(self, peer: PeerId) -> None:
        """A peer claims to be a member."""
        self.show([peer])

    def check(self, peer: PeerId, chain: tuple[Fact, ...]) -> None:
        """Admit a peer by its chain. Raises RemoteProtocolError: it proves nothing."""
        self.admission.receive(peer, Present(self.admission.run, chain))
        if not self.admits(peer):
            raise RemoteProtocolError("too many members")

    def chain_for(self, peer: PeerId) -> tuple[Fact, ...] | None:
        """Return the tickets by which a peer that is asked would be a member; None: this one cannot ask."""
        return self.admission.extended(peer, self.clock.wall()) if self.admission.can_vouch else None
