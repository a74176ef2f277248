"""A round of averaging: how it is wanted, what came of it, and what is seen of the others meanwhile."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from crypto.identity import PeerId
from gossip.averaging.aggregates import liars_max
from gossip.averaging.codecs import Codec
from gossip.averaging.group import GROUP_MEMBERS_MAX, Aggregate
from gossip.averaging.outcome import Patience
from gossip.averaging.robust.reduction import Vector
from gossip.roster import Report

Mode = Literal["butterfly", "exchange"]


@dataclass(frozen=True)
class RunView:
    """The other participants of a run, and what they say.

    `strangers` are peers under the same name that average other tensors. `other_rules`: how many of them
    average the same tensors by a rule of another name. `stranger_signatures`: what each of them averages.
    """

    peers: int = 0
    strangers: int = 0
    other_rules: Mapping[str, int] = field(default_factory=dict)
    stranger_signatures: Sequence[bytes] = field(default=(), repr=False)
    reports: Sequence[Report] = field(default=(), repr=False)
    awaited: Mapping[PeerId, Report] = field(default_factory=dict, repr=False)
    """Those of them that rounds wait for."""
    voices: Sequence[Report] = field(default=(), repr=False)
    """Those of `reports` whose word on where the run is counts: not of members that do not average here."""


@dataclass(frozen=True)
class Round:
    """What came of one round here. With an `error` nothing was averaged, and the old tensors stand.

    `shares` says whose tensors entered, by peer, and with which part of the total weight; a peer that came
    too late gets the mean of the others, and is not in it. `digest` is equal at all that hold the same mean.
    """

    vector: Vector | None = field(repr=False)
    shares: dict[PeerId, float]
    members: int
    seconds: float
    sent_bytes: int
    received_bytes: int
    digest: bytes
    error: str = ""
    rounding: float = 0.0
    """The relative error that a codec added to what this peer sent."""
    attempt: bytes = b""
    """The name of the attempt that succeeded: all that name it hold the same bytes."""
    aggregate: Aggregate = "mean"
    """The rule of the run."""
    waited_seconds: float = 0.0
    """How long of `seconds` it waited for peers that were not ready."""

    @property
    def is_averaged(self) -> bool:
        return not self.error

    @property
    def liars_max(self) -> int:
        """How many of those in `shares` may have lied without taking a number out of the honest range."""
        return liars_max(self.aggregate, len(self.shares))


@dataclass(frozen=True)
class Wanted:
    """How a round is to be held.

    `round` gives all peers that are in it one group under this number, which late ones cannot enter; None:
    the next group that forms of those that want one. `window_seconds`: how long it waits for those that are
    expected, `patience_seconds` for anybody. `rate` None: as it was measured; 0: this peer only sends. Its
    vector is None where it only helps.
    """

    round: int | None = None
    codec: str = "float32"
    mode: Mode = "butterfly"
    window_seconds: float = 5.0
    patience_seconds: float = 60.0
    size_min: int = 2
    size_max: int = GROUP_MEMBERS_MAX
    rate: int | None = None
    patience: Patience | None = None
    """None: by what earlier attempts took here."""
    codecs: Mapping[str, Codec] = field(default_factory=dict)
    """Those of this process's own, by name."""


class Gate(Protocol):
    """Says who may take part in a run, where not everybody may. `seen`: this peer claims to; what it says
    counts once it is admitted, and `Participation.entered` was called."""

    def admits(self, peer: PeerId) -> bool: ...
    def seen(self, peer: PeerId) -> None: ...
