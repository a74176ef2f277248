"""The input and the output of a door: wishes and events."""

from dataclasses import dataclass
from typing import Literal

from crypto.identity import PeerId
from partition.codecs.base import Array
from partition.serve.sampling import Sampling

FinishReason = Literal["stop", "length", "cancelled", "failed"]


@dataclass(frozen=True)
class Shape:
    """A service as a door knows it: its stages, the numbers in a row that it answers (its vocabulary,
    or a vector's), the tokens it takes."""

    service: bytes
    stages: int
    vocabulary: int
    context: int


@dataclass(frozen=True)
class GenerationWish:
    """The request for a generation. `stops` are the tokens that end it, which are not part of the text."""

    prompt: tuple[int, ...]
    tokens_max: int
    sampling: Sampling
    stops: frozenset[int] = frozenset()
    is_exact: bool = False
    """Whether to end instead of continuing where the next tokens might differ."""
    owner: str = ""
    """It may begin from sessions of the same owner only."""
    is_masked: bool = False
    """Whether `Door.permit` sets the allowed tokens for each position."""
    is_vector: bool = False
    """Whether an encoder is asked: the prompt goes as one unit, and the row that comes is the answer."""
    is_hidden: bool = False
    """Whether the prompt's hidden states are the answer, a row for each token, and no token follows."""

    @property
    def unit_tokens(self) -> int:
        """Return the tokens of a unit if all must go in one; else 0."""
        return len(self.prompt) if self.is_vector else 0

    @property
    def best(self) -> int:
        """Return how many of the best numbers of a row are wanted; 0 for all."""
        return 0 if self.is_masked or self.is_vector or self.is_hidden else self.sampling.best


@dataclass(frozen=True)
class Sampled:
    """The next token of a generation. `logprob` is by the model, before temperature and filters; `top` are
    the requested number of likeliest tokens with theirs."""

    generation: int
    position: int
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Embedded:
    """The vector of a text that an encoder was asked for; its generation is over then."""

    generation: int
    vector: Array


@dataclass(frozen=True)
class HiddenRead:
    """The hidden states of a prompt, a row for each token; its generation is over then."""

    generation: int
    rows: Array


@dataclass(frozen=True)
class GenerationOver:
    """A generation is over; `detail` explains a failure to people."""

    generation: int
    reason: FinishReason
    detail: str = ""


@dataclass(frozen=True)
class RouteWanted:
    """A provider was lost, or some stage has no known replica: look for this service's members."""

    service: bytes


@dataclass(frozen=True)
class RouteTaken:
    """A generation goes over these peers from now on; `lost` is why it left the route before, if it did, and
    `is_exact` whether the tokens to come are those that would have come there."""

    generation: int
    route: tuple[PeerId, ...]
    tokens: int
    lost: str = ""
    is_exact: bool = True
    shared: int = 0
    """The first tokens that are not read again."""


@dataclass(frozen=True)
class Misbehaved:
    """A provider broke the protocol."""

    peer: PeerId
    reason: str


@dataclass(frozen=True)
class ComputedFor:
    """These peers, one a stage, have computed this many tokens of a service for this door."""

    service: bytes
    route: tuple[PeerId, ...]
    tokens: int


Event = Sampled | Embedded | HiddenRead | GenerationOver | RouteWanted | RouteTaken | Misbehaved | ComputedFor
