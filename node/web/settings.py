"""The settings of a page's server and of the door of models: their bounds against their siblings, and good
values."""

from dataclasses import dataclass

from crypto.registers import Budget

PATIENCE_SECONDS = 10.0
"""How long an idle connection of the owner's browser keeps its place when another needs it."""


@dataclass(frozen=True)
class WebSettings:
    """The limits of one node's page. Raises ValueError where they contradict each other."""

    connections_max: int = 128
    """Connections. A browser opens six a page. One more displaces the longest silent one: strangers before
    those that have shown the token, and among strangers those of the address with the most. Connections of
    this machine are told apart only by the token. 128."""

    doorway_max: int = 32
    """Further connections, which may identify themselves: a browser's six, and a few clients'. Those that
    show the token or a key are served; of the others a new one displaces the oldest, or the newest of an
    address with too many. 0 for none. 32."""

    doorway_seconds: float = 2.0
    """How long each of those keeps its connection, however full the doorway is: a TLS handshake and a request
    take three round trips. A flood that fills the doorway holds it for as long. 2."""

    request_seconds_max: float = 5.0
    """From a request's first byte to its last. 5."""

    long_request_seconds_max: float = 30.0
    """The same where a long body is allowed, which comes over slow links too. At least
    `request_seconds_max`. 30."""

    idle_seconds_max: float = 30.0
    """How long a connection may wait for its next request. 30."""

    chats_max: int = 16
    """Answers of open pages at once: each page gives one at a time. 0 for none. 16."""

    waiting_max: int = 64
    """Requests of one key that wait for their turn. At least 1, for a request waits before it has its turn.
    64."""

    body_bytes_max: int = 4 << 20
    """The body of a request to a model: a conversation of a million tokens; no model here takes more. Above
    a short body's 64 KiB. 4 MiB."""

    deltas_kept_max: int = 1_200
    """Deltas of ten minutes: a laptop that was closed for less continues from them. At least 1. 1,200."""

    def __post_init__(self) -> None:
        bounds = (
            (self.connections_max >= 1, "connections at least 1"),
            (
                0 < self.request_seconds_max <= self.long_request_seconds_max,
                "a long request lasts as long as a short",
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
        """The budget of connections."""
        return Budget(self.connections_max, self.connections_max, self.connections_max, PATIENCE_SECONDS)
