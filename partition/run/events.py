"""Events of `partition.run.member`: instructions of a run's member to its driver."""

from dataclasses import dataclass

from crypto.identity import PeerId
from partition.plan.change import Change
from partition.plan.plan import Plan
from partition.run.hosting import StageAction
from partition.run.states import State
from partition.run.way_back import WayBack


@dataclass(frozen=True)
class PlanFollowed:
    """Messages of this plan are for this member from now on."""

    plan: Plan


@dataclass(frozen=True)
class PlanEntered:
    """The plan is in force: this node's work as a trainer under the last one ends."""

    plan: Plan
    is_first: bool


@dataclass(frozen=True)
class RolesGiven:
    """Take the roles that the plan gives to this node, and only these. `stage` is what to do with its stage,
    None for nothing. `lost_steps` are to be committed again. `is_over`: the run ends, and nothing is
    trained."""

    plan: Plan
    change: Change | None
    stage: StageAction | None
    lost_steps: int
    is_over: bool


@dataclass(frozen=True)
class StageAbandoned:
    """Close the stage that was opened for a plan that was not decided in time."""


@dataclass(frozen=True)
class StateChanged:
    """The run is in another state for this member, and why, for a person. `waits_for` are the machines whose
    return would end a pause. `is_note`: a person should read it though the state may be as before."""

    state: State
    reason: str
    waits_for: tuple[PeerId, ...] = ()
    is_note: bool = False


@dataclass(frozen=True)
class RunLeft:
    """The run goes on without this node, which forgets it and waits to be asked again. `is_branch`: it left a
    branch of the run for another."""

    is_branch: bool


@dataclass(frozen=True)
class PromisesMade:
    """Write down `durable` of the chain of plans, then call `stored`: until then nothing of it is sent."""


@dataclass(frozen=True)
class MessageRefused:
    """A peer sent a message about plans that no correct peer sends, and why it is none."""

    peer: PeerId
    reason: str


@dataclass(frozen=True)
class PauseWanted:
    """As the committer: pause between two steps, because a member wants to leave."""


@dataclass(frozen=True)
class SaveWanted:
    """As the committer, while no step is open: have all stages saved as they are after `step` steps."""

    step: int


@dataclass(frozen=True)
class StepsWanted:
    """As the committer: open steps again after a pause."""


@dataclass(frozen=True)
class SealWanted:
    """As the committer: make a checkpoint of these states of all stages, and keep it; then call `sealed` of
    the member's checkpoints, or `seal_failed`."""

    plan: Plan
    step: int
    states: tuple[object, ...]


@dataclass(frozen=True)
class NewestChanged:
    """Write down the newest checkpoint, or that there is none, then call `stored` of the member's
    checkpoints: until then nobody is told of it."""

    newest: WayBack | None


@dataclass(frozen=True)
class CheckpointWhole:
    """As the committer: a checkpoint of these states has its name at `copies` keepers of each stage or
    more."""

    plan: Plan
    step: int
    states: tuple[object, ...]
    name: bytes
    copies: int


@dataclass(frozen=True)
class CheckpointEnded:
    """As the committer: no checkpoint is copied any more; the last one is whole, or failed."""


@dataclass(frozen=True)
class ResultWanted:
    """As the committer: all stages were handed over under this plan. Join them and keep the result, then call
    `result_kept`, `result_spoilt` or `result_lost` of the member's end."""

    plan: Plan


@dataclass(frozen=True)
class RunOver:
    """End the run here: all living members have heard of it, or none is left to tell. `weights` is the hash
    of the result in hex, empty where there is none."""

    outcome: str
    detail: str
    weights: str = ""


Event = (
    PlanFollowed
    | PlanEntered
    | RolesGiven
    | StageAbandoned
    | StateChanged
    | RunLeft
    | PromisesMade
    | MessageRefused
    | PauseWanted
    | SaveWanted
    | StepsWanted
    | SealWanted
    | NewestChanged
    | CheckpointWhole
    | CheckpointEnded
    | ResultWanted
    | RunOver
)
