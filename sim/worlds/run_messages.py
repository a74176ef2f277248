"""Messages among members of a run in a world of cores, beside those of the cores.

Only their time and bytes are modelled. They never go on a wire, so they have no signatures and limits.
"""

from dataclasses import dataclass, field

from partition.plan.plan import NO_HASH
from partition.run.asks import Request

MESSAGE_BYTES = 256
"""The size of a message on the network: most are names of plans and some numbers."""
STATE_BYTES = 64 * 1024
"""The size of a stage's state on the network."""


# On the ordered streams


@dataclass(frozen=True)
class Noted:
    """Committer to the others: this many steps are committed."""

    plan: bytes
    step: int


@dataclass(frozen=True)
class Saved:
    """Replica to committer: its stage after `step` steps is stored at the replica."""

    plan: bytes
    step: int
    stage: int


# Requests


@dataclass(frozen=True)
class FetchState:
    """Newcomer to a replica of its stage: fetch the state after `step` steps."""

    plan: bytes
    step: int


@dataclass(frozen=True)
class FetchCopy:
    """Any member to any other: fetch the copy of one of the run's original stages."""

    step: int
    unit: int


Question = Request | FetchState | FetchCopy


# On disks


@dataclass
class Disk:
    """The records of one run at one peer, kept across a restart. `chain` is empty while the peer is no
    member; `copies` are by step and original stage."""

    chain: bytes = b""
    newest: tuple[bytes, int] | None = None
    copies: dict[tuple[int, int], object] = field(default_factory=dict)

    def forget_chain(self) -> None:
        """Forget the chain of an unfinished run; its checkpoints stay."""
        self.chain = b""


def checkpoint_name(run: bytes, step: int) -> bytes:
    """Return the name of the state of a step, equal for all savers."""
    return bytes(left ^ right for left, right in zip(run, step.to_bytes(len(NO_HASH), "big"), strict=True))
