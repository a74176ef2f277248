"""Requests between members of a run, each on a stream of its own, with one question and one answer.

`/peerloom/runs/2` carries messages with answers: placing, leasing, starting, ending, models, weights. The
messages of a step (frames, step messages, all-reduce parts, notices) go by `/peerloom/pipeline/2`.
"""

from typing import Annotated, Literal

import msgspec

from crypto.errors import RemoteProtocolError
from crypto.facts import Fact
from gossip.allreduce import Part
from node.protocols.checkpoint import StageState
from node.protocols.notices import Notice, StepNotice
from node.seams import StreamLimits
from partition.plan.history import HISTORY_BYTES_MAX, History
from partition.plan.paxos_messages import AgreementMessage
from partition.plan.plan import (
    PLAN_BYTES_MAX,
    Count,
    Hash,
    Peer,
    StageNumber,
    StepNumber,
)
from partition.run import dispatch
from partition.run.asks import Declined, Done
from partition.run.messages import Absent, Checkpointed, GivenUp, Leaving, Reason, Recut
from partition.run.states import State
from partition.run.tickets import Chain
from partition.steps.frames import Frame
from partition.steps.messages import CommitterMessage, ReplicaMessage

RUNS_PROTOCOL = "/peerloom/runs/2"
RUNS_WORD = RUNS_PROTOCOL.removeprefix("/peerloom/")
"""The capability by which a member announces that it understands this version."""
PIPELINE_PROTOCOL = "/peerloom/pipeline/2"
REQUEST_BYTES_MAX = PLAN_BYTES_MAX + HISTORY_BYTES_MAX + 16 * 1024
"""Maximum size of a request: a plan, its history, and the signatures and the manifest around them."""
PIPELINE_BYTES_MAX = 4 * 1024 * 1024
"""Maximum size of a pipeline message. The longest is an Open of 64 stages and 4,096 micro-batches, all
counted: 2.6 MB. The data of a frame is sent separately, with a limit of its own."""
PIPELINE_STREAMS = StreamLimits(message_bytes_max=PIPELINE_BYTES_MAX, streams_per_peer_max=4)
"""A member has one stream, and may open a new one after the first broke before this node has noticed."""
BLOB_BYTES_MAX = 16 * 1024**3
RANGE_BYTES_MAX = 16 * 1024 * 1024
"""Maximum size of the initial values in one answer, so that a node that answers many requests has enough
memory."""
BLOB_CHUNK_BYTES = 4 * 1024 * 1024

PlanBytes = Annotated[bytes, msgspec.Meta(max_length=PLAN_BYTES_MAX)]


class LeaseRequest(msgspec.Struct, frozen=True, tag="lease"):
    """Planner to a provider: hold a slot for this stage. Answered by Leased or Declined ("busy").

    A witness has no stage and needs no slot. The first plan has no `history` yet, because it is signed once
    it is in force. `revision` has the priority and deadline that the requester has set for the run, if any.
    """

    manifest: Fact
    plan: PlanBytes
    stage: StageNumber | None
    history: History | None = None
    revision: Fact | None = None


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Planner to a provider that granted a lease: the plan was abandoned, so the slot is free."""

    run: Hash
    plan: Hash


class WithdrawRun(msgspec.Struct, frozen=True, tag="withdraw"):
    """Planner to a provider that has put the run in its queue: the run no longer needs a slot there. Answered
    by Done."""

    run: Hash


class EnterQueue(msgspec.Struct, frozen=True, tag="enter queue"):
    """Requester to a provider: the run wants one of the provider's slots. Answered by Done if it may have one
    now, or Declined. In larger swarms a requester asks all providers simultaneously, before it leases any
    slot."""

    manifest: Fact
    revision: Fact | None = None


class Join(msgspec.Struct, frozen=True, tag="join"):
    """A member of a run in local mode to a node that is not in it: take part. Answered by Done if the node
    will, or Declined. The chain of tickets makes the node a member; the last ticket is the sender's, and
    fresh. The node holds `stage` of the model. With `is_beside`, it does so in addition to a stage that it
    already holds for this head."""

    manifest: Fact
    chain: Chain
    stage: StageNumber = 0
    is_beside: bool = False


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Requester to member, or committer to a newcomer: this plan is in force. Answered by Done once the
    receiver knows it; the receiver then opens its stage by itself."""

    manifest: Fact
    plan: PlanBytes
    history: History


class PrepareStage(msgspec.Struct, frozen=True, tag="prepare stage"):
    """Planner to a provider that granted a lease: open the stage, because this plan may soon be decided.
    Answered by Done when it is open."""

    manifest: Fact
    plan: PlanBytes
    history: History


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """Committer to member: the run goes on. Answered by Done, or Declined if the receiver has forgotten the
    run."""

    run: Hash
    plan: Hash


class FetchState(msgspec.Struct, frozen=True, tag="state"):
    """Newcomer to a replica of its stage: a part of an arena after `step` steps. Answered by a Blob."""

    plan: Hash
    step: StepNumber
    arena: Literal["parameters", "moments"]
    offset: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    length: Annotated[int, msgspec.Meta(ge=1, le=RANGE_BYTES_MAX)]


class ExportStage(msgspec.Struct, frozen=True, tag="export"):
    """Committer to replica: send your stage's parameters. Answered by a Blob."""

    plan: Hash


class End(msgspec.Struct, frozen=True, tag="end"):
    """Committer to member: the run is over. Answered by Done once the weights are fetched.

    `weights` is their BLAKE3 hash in hex; empty if the run failed.
    """

    plan: Hash
    outcome: Annotated[str, msgspec.Meta(pattern=r"^(done|failed)\Z")]
    detail: Reason
    weights: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Any peer to a member: the run is over, as its requester's signed statement says
    (`node.runs.stopping.StopBody`). Answered by Done, or Declined if the receiver does not know the run."""

    stop: Fact


class Revise(msgspec.Struct, frozen=True, tag="revise"):
    """Any peer to a member: the requester has revised the run (`node.protocols.revision.RevisionBody`).
    Answered by Done, or Declined if the receiver does not know the run."""

    revision: Fact


class Describe(msgspec.Struct, frozen=True, tag="describe"):
    """Any peer to a member: describe the run with this short id. Answered by Described, or Declined."""

    run: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]


class FetchWeights(msgspec.Struct, frozen=True, tag="fetch"):
    """Any peer to a holder: send the weights of a run, given by its short id. Answered by a Blob or
    Declined."""

    run: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]


class FetchModel(msgspec.Struct, frozen=True, tag="model"):
    """Any peer to a holder: send the graph with this hash. Answered by a Blob or Declined."""

    graph: Hash


class FetchRange(msgspec.Struct, frozen=True, tag="range"):
    """Replica to a holder: send a part of the file of a graph's initial values. The offset counts from the
    beginning of their data. Answered by a Blob or Declined."""

    graph: Hash
    offset: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    length: Annotated[int, msgspec.Meta(ge=1, le=RANGE_BYTES_MAX)]


Request = (
    LeaseRequest
    | Release
    | WithdrawRun
    | EnterQueue
    | Join
    | Start
    | PrepareStage
    | Renew
    | FetchState
    | ExportStage
    | End
    | Stop
    | Revise
    | Describe
    | FetchWeights
    | FetchModel
    | FetchRange
)


class Leased(msgspec.Struct, frozen=True, tag="leased"):
    """The provider's signed promise: a `LeaseBody`."""

    lease: Fact


class Blob(msgspec.Struct, frozen=True, tag="blob"):
    """This many bytes follow on the stream, in chunks."""

    size_bytes: Annotated[int, msgspec.Meta(ge=0, le=BLOB_BYTES_MAX)]


class Described(msgspec.Struct, frozen=True, tag="described"):
    """A run as the asked member knows it. Like everything that members report to outsiders, this is only a
    claim. `status` is one of `partition.run.states`; `weights` is the hash (hex) of the result."""

    model: Annotated[str, msgspec.Meta(max_length=40)]
    data: Annotated[str, msgspec.Meta(max_length=64)]
    requester: Peer
    status: State
    step: StepNumber
    steps: StepNumber
    loss: float | None = None
    accuracy: float | None = None
    detail: Reason = ""
    weights: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""


Reply = Leased | Declined | Done | Blob | Described


class LeaseBody(msgspec.Struct, frozen=True, array_like=True):
    """A provider's promise to hold `stage` of `plan`, or to be a witness of the plan. It ends when the
    provider has heard nothing of the run for this long."""

    run: Hash
    plan: Hash
    stage: StageNumber | None
    silence_seconds_max: Count


LEASE_PURPOSE = "lease"


def check_step(message: object, steps: int) -> None:
    """Check that a message's step is possible in a run of `steps`. Raises RemoteProtocolError."""
    said = message.news if isinstance(message, Notice) else message
    done = getattr(said, "step", None)
    if isinstance(said, StepNotice):
        done = said.step + 1
    if done is not None and done > steps:
        raise RemoteProtocolError(f"step {done} of a run of {steps}")


class GroupPart(msgspec.Struct, frozen=True, tag="part"):
    """Replica to replica: a part of their stage's all-reduce; its key begins with the plan's hash."""

    part: Part


class Revised(msgspec.Struct, frozen=True, tag="revised"):
    """Committer to member: the requester's newest revision of the run, sent before any step that follows from
    it."""

    plan: Hash
    revision: Fact


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    """Replica to committer: the replica has saved its stage after this step, which took this long."""

    plan: Hash
    step: StepNumber
    stage: StageNumber
    state: StageState
    milliseconds: Annotated[int, msgspec.Meta(ge=0, le=2**32)] = 0


PipelineMessage = (
    Absent
    | Leaving
    | Saved
    | Revised
    | Checkpointed
    | Recut
    | GivenUp
    | Frame
    | CommitterMessage
    | ReplicaMessage
    | GroupPart
    | Notice
    | AgreementMessage
)

Early = dispatch.Early | Revised
"""Messages kept for a plan that is decided, but not yet in force here."""
