"""The parts of a node that experiments and tests may replace (`node.seams.Seams.part`)."""

from dht.kademlia import Kademlia
from gossip.averaging.attempt import Attempt
from gossip.averaging.proof_table import ProofTable
from gossip.swim import Swim
from node.averaging.early_streams import EarlyStreams
from node.averaging.expectations import Expectations
from node.averaging.participation import Participation
from node.averaging.runner import Runner
from node.averaging.service import Averaging
from node.content.graphs import Models
from node.errors import UsageError
from node.local.service import LocalRuns
from node.local.trainer import LocalTrainer
from node.pipeline.committer import CommitterShell
from node.pipeline.feeder import FeederShell
from node.pipeline.frame_store import FrameStore
from node.pipeline.links import Links
from node.pipeline.replica import ReplicaShell
from node.pipeline.stage_reduction import StageReduction
from node.runs.member import RunMember
from node.runs.runs import Runs
from node.seams import Parts
from node.services.discovery import Discovery
from node.serving.stage import HeldStage
from partition.plan.paxos import PaxosChain
from partition.run.member import Member
from partition.serve.provider import SessionProvider

PARTS: frozenset[type] = frozenset(
    {
        Attempt,
        Averaging,
        CommitterShell,
        Discovery,
        EarlyStreams,
        Expectations,
        FeederShell,
        FrameStore,
        HeldStage,
        Kademlia,
        Links,
        LocalRuns,
        LocalTrainer,
        Member,
        Models,
        Participation,
        PaxosChain,
        ProofTable,
        ReplicaShell,
        RunMember,
        Runner,
        Runs,
        SessionProvider,
        StageReduction,
        Swim,
    }
)
"""Each part is called where the node creates one, so any callable can replace it. A replacement for HeldStage
must be a class with an async method `open`."""


def checked_parts(parts: Parts) -> Parts:
    """Return `parts`. Raises UsageError for a class that is not a replaceable part."""
    for kind in parts:
        if kind not in PARTS:
            known = ", ".join(sorted(each.__name__ for each in PARTS))
            name = getattr(kind, "__name__", repr(kind))
            raise UsageError(f"parts: a node has no part {name} to be replaced", f"Replace any of {known}.")
    return parts
