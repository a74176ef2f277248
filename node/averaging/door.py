"""Admission to a run by tickets, for the averaging service and for members that ask nodes to join."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from crypto.errors import RemoteProtocolError
from crypto.facts import Fact
from crypto.identity import PeerId
from node.seams import Clock
from partition.run.admission import Admission, Present


@dataclass(frozen=True)
class TicketGate:
    """The `Gate` of one run. `show` sends this member's own chain of tickets to peers that are not known to
    be members, and asks for theirs; `greet` sends it to members too."""

    admission: Admission
    clock: Clock
    show: Callable[[Collection[PeerId]], None]
    greet: Callable[[Collection[PeerId]], None] = lambda _: None

    def admits(self, peer: PeerId) -> bool:
        """Return whether a peer is known to be a member."""
        self.admission.expire(self.clock.wall())
        return self.admission.admits(peer)

    @property
    def admit(self) -> str:
        """The rule for admission: "invited", or "vouched" if invited peers may vouch for others."""
        return "invited" if self.admission.chain_max == 1 else "vouched"

    def seen(self, peer: PeerId) -> None:
        """Handle a peer that claims to be a member."""
        self.show([peer])

    def check(self, peer: PeerId, chain: tuple[Fact, ...]) -> None:
        """Admit a peer by its chain. Raises RemoteProtocolError if the chain proves nothing."""
        self.admission.receive(peer, Present(self.admission.run, chain))
        if not self.admits(peer):
            raise RemoteProtocolError("no ticket in the chain is still valid, or there are too many members")

    def chain_for(self, peer: PeerId) -> tuple[Fact, ...] | None:
        """Return the tickets that make an asked peer a member; None if this node cannot invite it."""
        is_barred = self.admission.revocations.fact_of(peer) is not None
        if is_barred or not self.admission.can_vouch:
            return None
        return self.admission.extended(peer, self.clock.wall())
