"""Events of the averaging runs that this node takes part in."""

from crypto.identity import PeerId
from node.events import Event


class AveragingOpened(Event, frozen=True, kw_only=True):
    """This node now takes part in an averaging run. `admit` is the admission rule: open (anybody who knows
    the run's name, if the swarm has no key), invited or vouched. `aggregate` is the aggregation rule."""

    run: str
    admit: str
    aggregate: str
    is_private: bool


class AveragingJoined(Event, frozen=True, kw_only=True):
    """Another peer joined an averaging run of this node; `peers` is the number of other peers in it now."""

    run: str
    peer: PeerId
    peers: int


class AveragingLeft(Event, frozen=True, kw_only=True):
    """A peer is no longer in the averaging run: it left, was lost, or is silent."""

    run: str
    peer: PeerId
    reason: str
    peers: int


class LiarProved(Event, frozen=True, kw_only=True):
    """A member of an averaging run signed two different statements of the kind `said` in one attempt. The
    proof is kept and sent to the others, and the member is excluded from the run."""

    run: str
    peer: PeerId
    said: str


class AveragingEnded(Event, frozen=True, kw_only=True):
    """A round of averaging has ended on this node. `outcome` is ok or failed, with the `reason`; a failed
    round averaged nothing. `averaged` are the peers whose tensors were included, out of `members` in the
    group. `rounding` is the relative error that the codec added to what this peer sent. `aggregate` is the
    rule; up to `liars_max` of the averaged peers may have lied without moving any value out of the range of
    the honest ones."""

    run: str
    outcome: str
    reason: str
    step: int
    members: int
    averaged: tuple[PeerId, ...]
    seconds: float
    sent_bytes: int
    received_bytes: int
    rounding: float = 0.0
    aggregate: str = "mean"
    liars_max: int = 0


class AveragingStepped(Event, frozen=True, kw_only=True):
    """This node made a global step from `samples` samples of itself and of `peers` other peers, `seconds`
    after the previous global step."""

    run: str
    step: int
    samples: int
    peers: int
    seconds: float


class StateFetched(Event, frozen=True, kw_only=True):
    """This peer has caught up: it fetched the state of global step `step` from other peers."""

    run: str
    step: int
    size_bytes: int
    seconds: float
