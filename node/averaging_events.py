"""Events of averaging runs that this node takes part in."""

from crypto.identity import PeerId
from node.events import Event


class AveragingOpened(Event, frozen=True, kw_only=True):
    """This node takes part in a run of averaging from now on. `admit` says who may: open (anybody who knows
    the run's name, where the swarm has no key), invited or vouched; `aggregate` is the rule."""

    run: str
    admit: str
    aggregate: str
    is_private: bool


class AveragingJoined(Event, frozen=True, kw_only=True):
    """Another peer takes part in a run of averaging that this node is in; now `peers` others do."""

    run: str
    peer: PeerId
    peers: int


class AveragingLeft(Event, frozen=True, kw_only=True):
    """A peer takes no part any more: it left, was lost, or is silent."""

    run: str
    peer: PeerId
    reason: str
    peers: int


class LiarProved(Event, frozen=True, kw_only=True):
    """A member of a run of averaging signed two statements of the kind `said` in one attempt, which differ.
    The proof is kept and told to others, and the member takes no part in the run any more."""

    run: str
    peer: PeerId
    said: str


class AveragingEnded(Event, frozen=True, kw_only=True):
    """A round of averaging is over here. `outcome`: ok or failed, with the reason; a failed one averaged
    nothing. `averaged` are those whose tensors entered, of `members` in the group; `rounding` is the relative
    error that the codec added to what this peer sent. `aggregate` is the rule, by which `liars_max` of the
    averaged may have lied without taking a number out of the honest range."""

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
    """A global step was made here: of `samples` from `peers` others and this one, in `seconds` since the one
    before."""

    run: str
    step: int
    samples: int
    peers: int
    seconds: float


class StateFetched(Event, frozen=True, kw_only=True):
    """This peer has caught up: it took the state of `step` from others."""

    run: str
    step: int
    size_bytes: int
    seconds: float
