"""The parts that a member of a run has once it has a plan."""

from dataclasses import dataclass
from fractions import Fraction

from partition.run.between_steps import BetweenSteps
from partition.run.branches import Branches
from partition.run.draining import Draining
from partition.run.keepalive import Keepalive
from partition.run.proposals import Proposer
from partition.run.run_end import RunEnd
from partition.run.stored_chain import StoredChain


@dataclass(frozen=True)
class Parts:
    """The constructors of the parts that a test or a user may replace."""

    branches: type[Branches] = Branches
    draining: type[Draining] = Draining
    keepalive: type[Keepalive] = Keepalive
    proposer: type[Proposer] = Proposer
    chain: type[StoredChain] = StoredChain
    end: type[RunEnd] = RunEnd


@dataclass
class MemberLife:
    """The parts of a member that has a plan."""

    chain: StoredChain
    branches: Branches
    proposer: Proposer
    between: BetweenSteps
    keepalive: Keepalive
    first_pace: Fraction
    """The pace of the plan with which this member began: see `partition.plan.merging.slowest_pace`."""
