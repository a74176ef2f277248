"""The part of `node.seams.Network` for machines on several networks: simulated ones are on one."""

from crypto.contact import Address
from crypto.identity import PeerId


class SingleHomed:
    """Between two simulated machines there is one path."""

    def admits(self, address: Address) -> bool:  # noqa: ARG002
        """Return True: every simulated address is public."""
        return True

    def paths(self, peer: PeerId) -> tuple[Address, ...]:  # noqa: ARG002
        """Return none, as on every machine of a single network."""
        return ()

    def prefer(self, peer: PeerId, address: Address) -> None:
        """Do nothing: there is no other path."""
