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
    """This member receives messages of this plan from now on."""

    plan: Plan


@dataclass(frozen=True)
class PlanEntered:
    """The plan is in force: this node's work as a trainer under the last one ends."""

    plan: Plan
    is_first: bool


@dataclass(frozen=True)
class RolesGiven:
    """Take the roles that the plan gives to this node, and only these. `stage` is the action for its stage,
    None for none. `lost_steps` must be committed again. `is_over`: the run ends, and nothing is trained."""

    plan: Plan
    change: Change | None
    stage: StageAction | None
    lost_steps: int
    is_over: bool


@dataclass(frozen=True)
class StageAbandoned:
    """Close the stage that was opened early for a plan that was not decided in time."""


@dataclass(frozen=True)
class StateChanged:
    """The state of the run changed for this member; the reason is for display. `waits_for` are the machines
    whose return would end a pause. `is_note`: the reason is to be displayed though the state may be as
    before."""

    state: State
    reason: str
    waits_for: tuple[PeerId, ...] = ()
    is_note: bool = False


@dataclass(frozen=True)
class RunLeft:
    """The run continues without this node, which forgets it and waits to be asked again. `is_branch`: it left
    a branch of the run for another."""

    is_branch: bool


@dataclass(frozen=True)
class PromisesMade:
    """Store `durable` of the chain of plans, then call `stored`; nothing of it is sent before."""


@dataclass(frozen=True)
class MessageRefused:
    """A peer sent a message about plans that no correct peer sends, with the reason."""

    peer: PeerId
    reason: str


@dataclass(frozen=True)
class PauseWanted:
    """As the committer: pause between two steps, because a member wants to leave."""


@dataclass(frozen=True)
class SaveWanted:
    """As the committer, while no step is open: make all stages save their state after `step` steps."""

    step: int


@dataclass(frozen=True)
class StepsWanted:
    """As the committer: open steps again after a pause."""


@dataclass(frozen=True)
class SealWanted:
    """As the committer: make and keep a checkpoint of these states of all stages. Then call `sealed` of the
    member's checkpoints, or `seal_failed`."""

    plan: Plan
    step: int
    states: tuple[object, ...]


@dataclass(frozen=True)
class NewestChanged:
    """Store the newest checkpoint, or that there is none. Then call `stored` of the member's checkpoints; the
    checkpoint is not announced before."""

    newest: WayBack | None


@dataclass(frozen=True)
class CheckpointWhole:
    """As the committer: a checkpoint of these states has its name at `copies` or more keepers of each
    stage."""

    plan: Plan
    step: int
    states: tuple[object, ...]
    name: bytes
    copies: int


@dataclass(frozen=True)
class CheckpointEnded:
    """As the committer: the copying of a checkpoint ended; it is whole, or failed."""


@dataclass(frozen=True)
class ResultWanted:
    """As the committer: all stages were handed over under this plan. Join them and keep the result, then call
    `result_kept`, `result_spoilt` or `result_lost` of the member's end."""

    plan: Plan


@dataclass(frozen=True)
class RunOver:
    """End the run here: all living members know, or none is left to tell. `weights` is the hash of the result
    in hex, empty without a result."""

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
