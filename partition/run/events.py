"""Events of `partition.run.member`: instructions from a run's member to its driver."""

from dataclasses import dataclass

from crypto.identity import PeerId
from partition.plan.change import Change
from partition.plan.plan import Plan
from partition.run.hosting import StageAction
from partition.run.states import State
from partition.run.way_back import WayBack


@dataclass(frozen=True)
class PlanFollowed:
    """Deliver messages of this plan to this member from now on."""

    plan: Plan


@dataclass(frozen=True)
class PlanEntered:
    """The plan is in force. This node's work as a trainer under the previous plan ends."""

    plan: Plan
    is_first: bool


@dataclass(frozen=True)
class RolesGiven:
    """Take the roles that the plan gives to this node, and only these. `stage` is the action for its stage,
    None if there is nothing to do. `lost_steps` is the number of steps that must be committed again.
    `is_over`: the run ends, and nothing is trained."""

    plan: Plan
    change: Change | None
    stage: StageAction | None
    lost_steps: int
    is_over: bool


@dataclass(frozen=True)
class StageAbandoned:
    """Close the stage that was opened early for a plan, because the plan was not decided in time."""


@dataclass(frozen=True)
class StateChanged:
    """The state of the run changed for this member; the reason is for display. `waits_for` are the machines
    whose return would end a pause. `is_note`: display the reason even if the state is the same as before."""

    state: State
    reason: str
    waits_for: tuple[PeerId, ...] = ()
    is_note: bool = False


@dataclass(frozen=True)
class RunLeft:
    """The run continues without this node, which forgets the run until it is asked again. `is_branch`: the
    node left its branch of the run for a different one."""

    is_branch: bool


@dataclass(frozen=True)
class PromisesMade:
    """Store `durable` of the chain of plans, then call `stored`. Nothing that depends on it is sent
    before."""


@dataclass(frozen=True)
class MessageRefused:
    """A peer sent a message about plans that no correct peer sends; `reason` explains why."""

    peer: PeerId
    reason: str


@dataclass(frozen=True)
class PauseWanted:
    """As the committer: pause between two steps, because a member wants to leave or borders between stages
    move."""


@dataclass(frozen=True)
class SaveWanted:
    """As the committer, while no step is open: make all stages save their state after `step` steps."""

    step: int


@dataclass(frozen=True)
class StepsWanted:
    """As the committer: open steps again after a pause."""


@dataclass(frozen=True)
class SealWanted:
    """As the committer: make and keep a checkpoint of these states of all stages. Then call `sealed` or
    `seal_failed` of the member's checkpoints."""

    plan: Plan
    step: int
    states: tuple[object, ...]


@dataclass(frozen=True)
class NewestChanged:
    """Store which checkpoint is the newest, or that there is none. Then call `stored` of the member's
    checkpoints. The checkpoint is not announced before."""

    newest: WayBack | None


@dataclass(frozen=True)
class CheckpointWhole:
    """As the committer: a checkpoint of these states is whole. For each stage, at least `copies` keepers have
    recorded its name."""

    plan: Plan
    step: int
    states: tuple[object, ...]
    name: bytes
    copies: int


@dataclass(frozen=True)
class CheckpointEnded:
    """As the committer: the copying of a checkpoint has ended, because it is whole or because it failed."""


@dataclass(frozen=True)
class ResultWanted:
    """As the committer: all stages were handed over under this plan. Join them and keep the result. Then call
    `result_kept`, `result_spoilt` or `result_lost` of the member's end."""

    plan: Plan


@dataclass(frozen=True)
class RunOver:
    """End the run here: all live members know, or none is left to be told. `weights` is the hash of the
    result in hex, or empty if there is no result."""

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
