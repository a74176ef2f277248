"""What a door keeps of each generation: its tokens, and the session and route that it has now."""

from collections import Counter, deque
from dataclasses import dataclass, field
from math import inf

from crypto.identity import PeerId
from partition.codecs.base import Array
from partition.serve.events import Shape, Wish
from partition.serve.messages import Work
from partition.serve.prefixes import PrefixKey
from partition.serve.sampling import LogitRow


@dataclass(eq=False)
class RouteAttempt:
    """One session of a generation, over one route."""

    session: bytes
    route: tuple[PeerId, ...]
    began_at: float
    bits: tuple[bytes, ...]
    reads: int
    """Tokens that there were when it began."""
    base: bytes = b""
    """The session that it begins from."""
    shared: int = 0
    """Tokens that it has from there."""
    opened: set[int] = field(default_factory=set)
    """Stages that have said that they serve it."""
    sent: int = 0
    units: int = 0
    computed: int = 0
    """Tokens of units that were answered."""
    flying: deque[Work] = field(default_factory=deque)
    moved_at: float = inf
    """When the oldest unit in flight became that."""
    row: LogitRow | None = None
    """A row that waits to be told which tokens may come."""
    hidden: list[Array] = field(default_factory=list)
    """The hidden states that came, where they are wanted."""

    @property
    def is_open(self) -> bool:
        return len(self.opened) == len(self.route)

    @property
    def known(self) -> int:
        """How many of its tokens every stage has computed."""
        return self.shared + self.computed


@dataclass(eq=False)
class OpenGeneration:
    """What a door keeps of a generation that goes on."""

    number: int
    shape: Shape
    wish: Wish
    tokens: list[int]
    waits_since: float
    attempt: RouteAttempt | None = None
    retry_at: float = -inf
    attempts: int = 0
    avoided: dict[PeerId, float] = field(default_factory=dict)
    """Peers that are not asked until then."""
    doubts: Counter[PeerId] = field(default_factory=Counter)
    """How many routes failed of which a peer may have been the reason: others are asked first."""
    reason: str = ""
    """Why the last route was lost."""
    missing_stage: int = -1
    missing: str = ""
    """Which stage nobody answered for when a route was last looked for."""
    bits: tuple[bytes, ...] = ()
    """The bit class of each stage that the newest token came from."""
    follows: int = 0
    """The generation that reads what this one begins with, and is waited for."""
    follows_tokens: int = 0
    """How many tokens they share."""
    allowed: Array | None = None
    """The tokens that may come next, a boolean each; None: it has not been said yet."""

    @property
    def key(self) -> PrefixKey:
        return PrefixKey(self.shape.service, self.wish.owner)
