"""The settings of a node's transport: what each does, how it is bounded by other settings, and a good value.

The network gets `TransportSettings` and gives each part its share; `PathSettings` is the share of multiplexed
paths. Limits that are the same for all networks are constants in the module that they concern.
"""

from dataclasses import dataclass, field

from crypto.registers import Budget


@dataclass(frozen=True)
class PathSettings:
    """The settings of multiplexed paths. Raises ValueError if they contradict each other."""

    ping_seconds: float = 1.0
    """Seconds between pings while channels are open: a tenth of the time in which a run must recover from a
    lost relay or a rebooted router. At most `idle_ping_seconds`. Default: 1."""

    idle_ping_seconds: float = 15.0
    """Seconds between pings without open channels: often enough for a carrier's router, which forgets a
    connection after a minute. Default: 15."""

    silent_seconds: float = 2.0
    """A path is silent if no byte has come for this long after a ping; then a different path is looked for. A
    link that loses two packets in a row is silent for a second. At most `doubted_seconds`. Default: 2."""

    doubted_seconds: float = 3.0
    """A path is dead if no byte has come for this long after a ping and there is other evidence, such as a
    new path opened by the peer. At most `dead_seconds`. Default: 3."""

    dead_seconds: float = 7.5
    """A path without other evidence is dead if no byte has come for this long after a ping. Default: 7.5."""

    late_seconds: float = 2.0
    """If a check is this late, this process itself has stalled, so it pings again before it declares a path
    dead. If a doubt has put the deadline into the past, the time since the previous check counts. Above
    `watch_seconds`, or every check would be late. Default: 2."""

    watch_seconds: float = 0.5
    """Seconds between checks on a path between two pings. At most `silent_seconds`. Default: 0.5."""

    per_peer_max: int = 4
    """Maximum number of paths to one peer: one through each of two relays, a punched one, and one that the
    peer has just dialled. Default: 4."""

    per_relay_max: int = 128
    """Maximum number of paths through one relay. The relay can invent peers behind it, each of which counts
    separately. At most `paths_max`; a quarter of it leaves room for three other relays. Default: 128."""

    paths_max: int = 512
    """Maximum number of paths in all, the same as for accepted connections. The path unused for longest makes
    room. Default: 512."""

    def __post_init__(self) -> None:
        bounds = (
            (
                0 < self.ping_seconds <= self.idle_ping_seconds,
                "ping_seconds above 0 and at most idle_ping_seconds",
            ),
            (0 < self.silent_seconds <= self.doubted_seconds <= self.dead_seconds, "silent, doubted, dead"),
            (
                0 < self.watch_seconds <= self.silent_seconds,
                "watch_seconds above 0 and at most silent_seconds",
            ),
            (self.watch_seconds < self.late_seconds, "watch_seconds below late_seconds"),
            (1 <= self.per_peer_max <= self.paths_max, "per_peer_max at least 1 and at most paths_max"),
            (1 <= self.per_relay_max <= self.paths_max, "per_relay_max at least 1 and at most paths_max"),
        )
        _check(bounds)


@dataclass(frozen=True)
class TransportSettings:
    """The settings of one network. Raises ValueError if they contradict each other."""

    handshake_seconds: float = 5.0
    """Time limit of a handshake, and of a greeting: four round trips over a slow path, with two lost packets.
    An unknown peer may hold a half-open connection for as long. Default: 5."""

    stall_seconds: float = 60.0
    """How long a sender may pause inside a message. Messages are complete before they are sent, so an honest
    sender does not pause. Default: 60."""

    vanished_seconds: float = 45.0
    """The other machine counts as gone once the kernel has retransmitted for this long without an answer.
    Together with `look_seconds`, a loss is noticed in about a minute; TCP alone takes a quarter of an hour.
    TCP_USER_TIMEOUT is not used, because it also ends a connection whose other machine answers but does not
    read. Default: 45."""

    look_seconds: float = 10.0
    """Seconds between checks for connections that are idle for too long or whose machine is gone, and for
    pooled memory that was not borrowed since the previous check. At most `vanished_seconds`. Default: 10."""

    half_open_max: int = 128
    """Maximum number of connections that have not yet shaken hands. Each holds a socket, and a task once it
    shakes hands. With handshakes of 0.4 s over a slow path, 300 hostile connections a second crowd out
    nobody, even if each has a source of its own. Default: 128."""

    inbound_max: int = 512
    """Maximum number of accepted connections. Each one in use costs a buffer of up to 128 KiB. Default:
    512."""

    inbound_per_peer_max: int = 64
    """Maximum number of accepted connections from one peer, so that it cannot take them all; a busy neighbour
    in a run has a dozen open. Must be below `inbound_per_network_max`, because one further connection tells
    the peer that it has too many. Default: 64."""

    inbound_per_network_max: int = 256
    """Maximum number of accepted connections from one network, so that an owner of many addresses, or many
    peers behind one address, leave room for others. At most `inbound_max`; half of it. Default: 256."""

    patience_seconds: float = 10.0
    """How long a connection with a known peer may carry nothing before it can be closed to make room.
    Default: 10."""

    refusals_max: int = 16
    """Maximum number of refused requests in a row on one connection: more than a peer of another version has
    protocols to try. Default: 16."""

    paths: PathSettings = field(default_factory=PathSettings)
    """The settings of multiplexed paths."""

    def __post_init__(self) -> None:
        bounds = (
            (self.handshake_seconds > 0, "handshake_seconds above 0"),
            (self.stall_seconds > 0, "stall_seconds above 0"),
            (
                0 < self.look_seconds <= self.vanished_seconds,
                "look_seconds above 0 and at most vanished_seconds",
            ),
            (self.half_open_max >= 1, "half_open_max at least 1"),
            (
                1 <= self.inbound_per_peer_max < self.inbound_per_network_max <= self.inbound_max,
                "1 <= inbound_per_peer_max < inbound_per_network_max <= inbound_max",
            ),
            (self.patience_seconds >= 0, "patience_seconds at least 0"),
            (self.refusals_max >= 0, "refusals_max at least 0"),
        )
        _check(bounds)

    @property
    def inbound(self) -> Budget:
        """Return the budget of connections from others. Each peer has one more than it may use, and the last
        one tells it that it has too many."""
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
