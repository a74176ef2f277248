"""Messages between members about the run itself, in addition to the messages about steps and plans.

Each message has the hash of the plan in force; receivers ignore messages of a different plan. `check_sender`
checks which member may send which message.
"""

from typing import Annotated

import msgspec

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.change import Change, Cuts
from partition.plan.plan import REPLICAS_MAX, Hash, Peer, Plan, StepNumber

REASON_LENGTH_MAX = 300
Reason = Annotated[str, msgspec.Meta(max_length=REASON_LENGTH_MAX)]


class Absent(msgspec.Struct, frozen=True, tag="absent"):
    """Committer to all other members, or a member about itself: the next plan must drop these peers, even if
    they are alive."""

    plan: Hash
    peers: Annotated[tuple[Peer, ...], msgspec.Meta(min_length=1, max_length=REPLICAS_MAX)]
    reason: Reason


class Checkpointed(msgspec.Struct, frozen=True, tag="checkpointed"):
    """Committer to all other members: the checkpoint of this name is whole, on several disks. FIRST_VALUES
    with 0 steps means that there is no checkpoint yet."""

    plan: Hash
    step: StepNumber
    checkpoint: Hash


class Recut(msgspec.Struct, frozen=True, tag="recut"):
    """Committer to all other members: measurements show better borders between stages. The next plan moves
    the borders to `cuts` (see `partition.plan.change.Change`), and takes the layers' state from this
    checkpoint of `step` steps. `is_final`: all steps are done, no border moves, and the checkpoint's state is
    the result."""

    plan: Hash
    step: StepNumber
    checkpoint: Hash
    cuts: Cuts
    is_final: bool = False

    @property
    def change(self) -> Change:
        """The change to decide."""
        return Change(restored=self.checkpoint, step=self.step, cuts=self.cuts, is_final=self.is_final)


class GivenUp(msgspec.Struct, frozen=True, tag="given up"):
    """Committer to all other members: this branch of the run ends, and a different branch continues."""

    plan: Hash


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """Member to all others: drop the sender from the next plan, after this step or immediately
    (`at_once`)."""

    plan: Hash
    at_once: bool = False


RunMessage = Absent | Checkpointed | GivenUp | Leaving | Recut


def check_sender(plan: Plan, sender: PeerId, message: object) -> None:
    """Check that `sender` may send this message under the plan in force.

    Any member may announce that it leaves, or declare itself absent. Only the committer may send other
    messages.

    Raises:
        RemoteProtocolError: the sender may not send this message.
    """
    if sender not in plan.roster:
        raise RemoteProtocolError("only members of the run may send this message")
    if isinstance(message, Leaving) or sender == plan.committer:
        return
    if not (isinstance(message, Absent) and message.peers == (sender,)):
        raise RemoteProtocolError("only the run's committer may send this message")
