"""The addresses that a node announces to others: its own, those that others confirmed, and its relays'
circuits.

`address_policy` ranks the machine's addresses. No I/O here.
"""

from collections.abc import Sequence

from crypto.contact import ADDRESSES_MAX, Address
from crypto.identity import PeerId
from node.transport.address_policy import AddressPolicy

CIRCUITS_TOLD_MAX = 2
"""Maximum number of relays at which a node announces that it can be reached."""


class AnnouncedAddresses:
    """The announced addresses of one node. If its user has set `fixed` addresses, they replace those that the
    node would find itself."""

    def __init__(self, peer: PeerId, policy: AddressPolicy, fixed: Sequence[Address]) -> None:
        self._peer = peer
        self._policy = policy
        self._fixed = tuple(fixed)
        self._confirmed: tuple[Address, ...] = ()
        self._mapped: Address | None = None
        self.circuits: tuple[Address, ...] = ()
        """The relays' circuits by which others reach this node."""
        self.addresses: tuple[Address, ...] = ()
        """All that is announced, each with this node's id."""

    def reach_by(self, circuits: Sequence[Address]) -> None:
        """Announce these circuits instead of the previous ones."""
        self.circuits = tuple(each.of(None) for each in circuits[:CIRCUITS_TOLD_MAX])
        self.choose()

    def confirm(self, address: Address) -> None:
        """Announce an address that others have found to lead here."""
        self._confirmed = (address.of(None), *self._confirmed)[:ADDRESSES_MAX]
        self.choose()

    def map_to(self, address: Address | None) -> None:
        """Announce an address that a router forwards to this node; None withdraws it."""
        self._mapped = address
        self.choose()

    def choose(self, *, has_moved: bool = False) -> None:
        """Recompute the announced addresses. A node that `has_moved` forgets what was confirmed in the old
        network."""
        if has_moved:
            self._confirmed = ()
        mapped = () if self._mapped is None else (self._mapped,)
        told = self._policy.own(self._fixed, (*mapped, *self._confirmed))
        told = (*told[: ADDRESSES_MAX - len(self.circuits)], *self.circuits)
        self.addresses = tuple(address.of(self._peer) for address in told)
