"""A round of averaging: the wish for it, its outcome, and the view of the other participants."""

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
class RosterView:
    """The other participants of a run, and their reports.

    `strangers` is the number of peers that average different tensors under the same run name. `other_rules`
    counts those among them that average the same tensors by a different rule, by the rule's name.
    `stranger_signatures` are the signatures of the strangers' tensors.
    """

    peers: int = 0
    strangers: int = 0
    other_rules: Mapping[str, int] = field(default_factory=dict)
    stranger_signatures: Sequence[bytes] = field(default=(), repr=False)
    reports: Sequence[Report] = field(default=(), repr=False)
    awaited: Mapping[PeerId, Report] = field(default_factory=dict, repr=False)
    """The participants that rounds wait for, with their reports."""
    voices: Sequence[Report] = field(default=(), repr=False)
    """The `reports` that count for the run's position; reports of members that do not average here are
    excluded."""


@dataclass(frozen=True)
class Round:
    """The outcome of one round on this node. If `error` is set, nothing was averaged, and the tensors are
    unchanged.

    `shares` maps the peers whose tensors were included to their share of the total weight. A peer that came
    too late gets the mean of the others, and is not in `shares`. `digest` is equal on all peers that hold the
    same mean.
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
    """The relative error that a codec added to this peer's data."""
    attempt: bytes = b""
    """The name of the successful attempt: all peers that report it hold the same bytes."""
    aggregate: Aggregate = "mean"
    """The aggregation rule of the run."""
    waited_seconds: float = 0.0
    """The part of `seconds` spent waiting for peers that were not ready."""

    @property
    def is_averaged(self) -> bool:
        return not self.error

    @property
    def liars_max(self) -> int:
        """The number of peers in `shares` that may have lied without moving any value out of the range of the
        honest peers' values."""
        return liars_max(self.aggregate, len(self.shares))


@dataclass(frozen=True)
class RoundWish:
    """A wish for a round.

    `round` is a number: all peers with the same number get one group, which late peers cannot enter. If it is
    None, the next group that forms among peers that want one is taken. `window_seconds` is how long the wish
    waits for expected peers, `patience_seconds` how long it waits for any. `rate` None: the measured rate; 0:
    this peer only sends. The vector is None if the peer only contributes to others' sums.
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
    """None: derived from the duration of earlier attempts here."""
    codecs: Mapping[str, Codec] = field(default_factory=dict)
    """This process's own codecs, by name."""


class Gate(Protocol):
    """The gate of a closed run. `seen` handles a peer that claims to take part. The peer's messages count
    once it is admitted and `Participation.entered` was called."""

    def admits(self, peer: PeerId) -> bool: ...
    def seen(self, peer: PeerId) -> None: ...
