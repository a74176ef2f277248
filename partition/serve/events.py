"""The input and the output of a door (the node that asks a service): wishes and events."""

from dataclasses import dataclass
from typing import Literal

from crypto.identity import PeerId
from partition.codecs.base import Array
from partition.serve.sampling import Sampling

FinishReason = Literal["stop", "length", "cancelled", "failed"]


@dataclass(frozen=True)
class Shape:
    """A service as a door knows it: the number of stages, the number of values in a row of its answer (the
    size of the vocabulary, or of a vector), and the maximum number of tokens."""

    service: bytes
    stages: int
    vocabulary: int
    context: int


@dataclass(frozen=True)
class GenerationWish:
    """The request for a generation. `stops` are the tokens that end it; they do not become part of the
    text."""

    prompt: tuple[int, ...]
    tokens_max: int
    sampling: Sampling
    stops: frozenset[int] = frozenset()
    is_exact: bool = False
    """Whether the generation must end instead of continuing with tokens that might differ."""
    owner: str = ""
    """The owner of the generation. It may begin only from sessions of the same owner."""
    is_masked: bool = False
    """Whether `Door.permit` sets the allowed tokens for each position."""
    is_vector: bool = False
    """Whether an encoder is asked: the prompt is sent as one unit, and the row that comes back is the
    answer."""
    is_hidden: bool = False
    """Whether the answer is the prompt's hidden states, one row for each token; no token is generated."""

    @property
    def unit_tokens(self) -> int:
        """The number of tokens that a unit must have if all tokens must be in one unit; else 0."""
        return len(self.prompt) if self.is_vector else 0

    @property
    def best(self) -> int:
        """How many of the largest logits of a row are needed; 0 for all."""
        return 0 if self.is_masked or self.is_vector or self.is_hidden else self.sampling.best


@dataclass(frozen=True)
class Sampled:
    """The next token of a generation. `logprob` is computed from the model's logits, before temperature and
    filters. `top` has the requested number of likeliest tokens with their logprobs."""

    generation: int
    position: int
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Embedded:
    """The vector of a text, as the encoder computed it. Its generation is then over."""

    generation: int
    vector: Array


@dataclass(frozen=True)
class HiddenRead:
    """The hidden states of a prompt, one row for each token. Their generation is then over."""

    generation: int
    rows: Array


@dataclass(frozen=True)
class GenerationOver:
    """A generation is over. `detail` explains a failure, for display."""

    generation: int
    reason: FinishReason
    detail: str = ""


@dataclass(frozen=True)
class RouteWanted:
    """A provider was lost, or some stage has no known replica: look for members of this service."""

    service: bytes


@dataclass(frozen=True)
class RouteTaken:
    """A generation uses these peers from now on. `lost` is why it left the previous route, if it had one.
    `is_exact`: the coming tokens are the same as on the previous route."""

    generation: int
    route: tuple[PeerId, ...]
    tokens: int
    lost: str = ""
    is_exact: bool = True
    shared: int = 0
    """The number of initial tokens that are not read again."""


@dataclass(frozen=True)
class Misbehaved:
    """A provider has violated the protocol."""

    peer: PeerId
    reason: str


@dataclass(frozen=True)
class ComputedFor:
    """These peers, one for each stage, have computed this many tokens of a service for this door."""

    service: bytes
    route: tuple[PeerId, ...]
    tokens: int


Event = Sampled | Embedded | HiddenRead | GenerationOver | RouteWanted | RouteTaken | Misbehaved | ComputedFor
