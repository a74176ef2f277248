"""The settings of a page's server and of the door of models: how they bound each other, and good values."""

from dataclasses import dataclass

from crypto.registers import Budget

PATIENCE_SECONDS = 10.0
"""How long an idle connection of the owner's browser keeps its place when a new connection needs it."""


@dataclass(frozen=True)
class WebSettings:
    """The limits of one node's page. Raises ValueError if they contradict each other."""

    connections_max: int = 128
    """Maximum number of connections; a browser opens six for a page. A further one displaces the connection
    that has been silent longest: unidentified ones before those that have presented the token, and among
    unidentified ones those of the address with the most. Only the token distinguishes connections from this
    machine. Default: 128."""

    doorway_max: int = 32
    """Maximum number of further connections, which may identify themselves: a browser's six, and a few
    clients'. Those that present the token or a key are served. Among the others, a new one displaces the
    oldest, or the newest of an address with too many. 0 for none. Default: 32."""

    doorway_seconds: float = 2.0
    """How long each of those keeps its connection, however full the doorway is: a TLS handshake and a request
    take three round trips. A flood that fills the doorway occupies it for this long. Default: 2."""

    request_seconds_max: float = 5.0
    """Maximum time from a request's first byte to its last. Default: 5."""

    long_request_seconds_max: float = 30.0
    """The same limit for a long body, if allowed, which also comes over slow links. At least
    `request_seconds_max`. Default: 30."""

    idle_seconds_max: float = 30.0
    """How long a connection may wait for its next request. Default: 30."""

    chats_max: int = 16
    """Maximum number of simultaneous answers for open pages; each page gets one at a time. 0 for none.
    Default: 16."""

    waiting_max: int = 64
    """Maximum number of one key's requests that wait in the queue. At least 1, because each request waits
    before it is served. Default: 64."""

    body_bytes_max: int = 4 << 20
    """Maximum body of a request to a model: a conversation of a million tokens, more than any model here
    takes. Above a short body's 64 KiB. Default: 4 MiB."""

    deltas_kept_max: int = 1_200
    """Maximum number of deltas kept: those of ten minutes, so that a laptop that was closed for less
    continues from them. At least 1. Default: 1,200."""

    def __post_init__(self) -> None:
        bounds = (
            (self.connections_max >= 1, "connections at least 1"),
            (
                0 < self.request_seconds_max <= self.long_request_seconds_max,
                "long_request_seconds_max at least request_seconds_max",
            ),
            (self.doorway_max >= 0, "doorway at least 0"),
            (self.doorway_seconds >= 0, "doorway seconds at least 0"),
            (self.idle_seconds_max > 0, "idle above 0"),
            (self.chats_max >= 0, "chats at least 0"),
            (self.waiting_max >= 1, "waiting at least 1"),
            (self.body_bytes_max > 64 << 10, "a body above 64 KiB"),
            (self.deltas_kept_max >= 1, "deltas at least 1"),
        )
        for holds, rule in bounds:
            if not holds:
                raise ValueError(f"web settings: {rule}")

    @property
    def places(self) -> Budget:
        """The budget of connections in the register."""
        return Budget(self.connections_max, self.connections_max, self.connections_max, PATIENCE_SECONDS)
