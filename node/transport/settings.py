"""The settings of a node's transport: what each does, its bounds against its siblings, a good value.

The network gets `TransportSettings` and gives each part its share; `PathSettings` is the share of multiplexed
paths. Limits that are the same for all networks are constants beside what they bound.
"""

from dataclasses import dataclass, field

from crypto.registers import Budget


@dataclass(frozen=True)
class PathSettings:
    """The settings of multiplexed paths. Raises ValueError where they contradict each other."""

    ping_seconds: float = 1.0
    """The interval of pings while channels are open: a tenth of the time in which a run must recover from a
    lost relay or a rebooted router. At most `idle_ping_seconds`. 1."""

    idle_ping_seconds: float = 15.0
    """The same without open channels: often enough for a carrier's router, which forgets a connection after a
    minute. 15."""

    silent_seconds: float = 2.0
    """A path without a byte for this long after a ping is silent: another one is looked for. A link that
    loses two packets in a row is silent for a second. At most `doubted_seconds`. 2."""

    doubted_seconds: float = 3.0
    """A path without a byte for this long after a ping is dead if there is other evidence: the peer has
    opened a new one. At most `dead_seconds`. 3."""

    dead_seconds: float = 7.5
    """The same without other evidence. 7.5."""

    late_seconds: float = 2.0
    """A process whose check is this late has stalled itself: it pings again before it declares a path dead.
    If a doubt has put the deadline into the past, the time since the last check counts. Above
    `watch_seconds`, or every check would be late. 2."""

    watch_seconds: float = 0.5
    """The interval of checks on a path between two pings. At most `silent_seconds`. 0.5."""

    per_peer_max: int = 4
    """Paths to one peer: one by each of two relays, a punched one, and one that it has just dialled. 4."""

    per_relay_max: int = 128
    """Paths that one relay carries: it can invent peers behind it, each of which counts separately. At most
    `paths_max`; a quarter of it leaves room for three other relays. 128."""

    paths_max: int = 512
    """All paths: as many as accepted connections. The one unused for longest makes room. 512."""

    def __post_init__(self) -> None:
        bounds = (
            (0 < self.ping_seconds <= self.idle_ping_seconds, "idle paths are pinged no more often"),
            (0 < self.silent_seconds <= self.doubted_seconds <= self.dead_seconds, "silent, doubted, dead"),
            (0 < self.watch_seconds <= self.silent_seconds, "a silent path is seen while it is silent"),
            (self.watch_seconds < self.late_seconds, "a look at its time is not late"),
            (1 <= self.per_peer_max <= self.paths_max, "paths to one peer at most all"),
            (1 <= self.per_relay_max <= self.paths_max, "paths by one relay at most all"),
        )
        _check(bounds)


@dataclass(frozen=True)
class TransportSettings:
    """The settings of one network. Raises ValueError where they contradict each other."""

    handshake_seconds: float = 5.0
    """The time limit of a handshake, and of a greeting: four round trips over a slow path, with two lost
    packets. A stranger may hold a half-open connection as long. 5."""

    stall_seconds: float = 60.0
    """How long a sender may pause inside a message, which was complete before it began to send. 60."""

    vanished_seconds: float = 45.0
    """The other machine is gone once the kernel has retransmitted for this long without an answer. With
    `look_seconds`, it is noticed in about a minute; TCP alone takes a quarter of an hour. Not by
    TCP_USER_TIMEOUT, which also ends a connection whose other side answers, but does not read. 45."""

    look_seconds: float = 10.0
    """The interval of checks for connections that are idle for too long or whose machine is gone, and for
    pooled memory that was not borrowed since the last one. At most `vanished_seconds`. 10."""

    half_open_max: int = 128
    """Connections that have not yet shaken hands. Each holds a socket, and a task once it shakes hands. With
    handshakes of 0.4 s over a slow path, 300 strangers a second crowd out nobody, even if each has a source
    of its own. 128."""

    inbound_max: int = 512
    """Accepted connections; each in use costs a buffer of up to 128 KiB. 512."""

    inbound_per_peer_max: int = 64
    """The same for one peer, so that it cannot take them all; a busy neighbour in a run has a dozen open.
    Below `inbound_per_network_max`: one more tells the peer that it has too many. 64."""

    inbound_per_network_max: int = 256
    """The same for one network, so that an owner of many addresses, or many peers behind one, leave room for
    others. At most `inbound_max`; half of it. 256."""

    patience_seconds: float = 10.0
    """How long a connection with a known peer may carry nothing before it makes room for another. 10."""

    refusals_max: int = 16
    """Wrong questions in a row on one connection: more than a peer of another version has protocols to try.
    16."""

    paths: PathSettings = field(default_factory=PathSettings)
    """The settings of multiplexed paths."""

    def __post_init__(self) -> None:
        bounds = (
            (self.handshake_seconds > 0, "handshake_seconds above 0"),
            (self.stall_seconds > 0, "stall_seconds above 0"),
            (0 < self.look_seconds <= self.vanished_seconds, "a look at least each vanished machine"),
            (self.half_open_max >= 1, "half_open_max at least 1"),
            (
                1 <= self.inbound_per_peer_max < self.inbound_per_network_max <= self.inbound_max,
                "connections of a peer below those of its network, at most all",
            ),
            (self.patience_seconds >= 0, "patience_seconds at least 0"),
            (self.refusals_max >= 0, "refusals_max at least 0"),
        )
        _check(bounds)

    @property
    def inbound(self) -> Budget:
        """Return the budget of connections from others. Each peer has one more than it may use: the last one
        tells it that it has too many."""
        return Budget(
            self.inbound_max,
            self.inbound_per_peer_max + 1,
            self.inbound_per_network_max,
            self.patience_seconds,
        )


def _check(bounds: tuple[tuple[bool, str], ...]) -> None:
    for holds, rule in bounds:
        if not holds:
            raise ValueError(f"transport settings: {rule}")


TRANSPORT = TransportSettings()
"""The usual settings."""
PATHS = TRANSPORT.paths
"""The usual settings of paths."""
