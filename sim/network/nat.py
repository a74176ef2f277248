"""Network address translators: which peers can reach a peer behind one, and when. No I/O.

The kinds have their names from RFC 3489 (RFC 4787 expresses the same in two dimensions). A mapping is opened
by sending and closes after `MAPPING_SECONDS` without sending. Two peers behind `restricted` NATs reach each
other once both have sent. A `symmetric` NAT uses a different port for each remote peer, and that peer learns
the port only from a message that got through. So a symmetric peer is reached only by peers that it could
reach first, and two symmetric peers never connect. Not modelled: hairpins, several peers behind one NAT,
running out of ports.
"""

from crypto.identity import PeerId
from sim.network.model import Nat

MAPPING_SECONDS = 120.0
"""RFC 4787 REQ-5: a UDP mapping must not expire in less than two minutes."""
MAPPINGS_KEPT = 512
"""Number of mappings beyond which expired ones are dropped."""

_ANYONE = PeerId(b"")


class Translator:
    """The NAT in front of one peer. Times are instants; a mapping opened at one instant is used only at later
    ones."""

    __slots__ = ("_is_forwarding", "_kind", "_mappings", "_room")

    def __init__(self, kind: Nat) -> None:
        self._kind = kind
        self._mappings: dict[PeerId, tuple[float, float]] = {}  # opened at, last used at
        self._room = MAPPINGS_KEPT
        self._is_forwarding = False

    def forward(self) -> None:
        """Forward all inbound traffic to the peer from now on."""
        self._is_forwarding = True

    def sent(self, receiver: PeerId, now: float) -> None:
        """Open or refresh the mapping through which the peer sends to `receiver`."""
        if self._kind == "full-cone":
            self._use(_ANYONE, now)
        elif self._kind == "restricted":
            self._use(receiver, now)

    def got_through(self, receiver: PeerId, now: float) -> None:
        """Record that a datagram of the peer has arrived at `receiver`, which now knows the mapping."""
        if self._kind == "symmetric":
            self._use(receiver, now)

    def lets_out(self) -> bool:
        """Return whether datagrams leave at all."""
        return self._kind != "blocked"

    def lets_in(self, sender: PeerId, now: float) -> bool:
        """Return whether a datagram of `sender` that arrives now reaches the peer behind the NAT."""
        if self._is_forwarding:
            return True
        since, used = self._mappings.get(_ANYONE if self._kind == "full-cone" else sender, (now, now))
        return since < now <= used + MAPPING_SECONDS

    def lets_streams_in(self, now: float) -> bool:
        """Return whether others may open streams: only through a full cone while its mapping exists, or if
        the NAT forwards."""
        return self._is_forwarding or (self._kind == "full-cone" and self.lets_in(_ANYONE, now))

    def _use(self, peer: PeerId, now: float) -> None:
        since, used = self._mappings.get(peer, (now, now))
        self._mappings[peer] = (since if now <= used + MAPPING_SECONDS else now, now)
        if len(self._mappings) > self._room:
            fresh = {peer: m for peer, m in self._mappings.items() if now <= m[1] + MAPPING_SECONDS}
            self._mappings = fresh
            self._room = max(MAPPINGS_KEPT, 2 * len(fresh))
