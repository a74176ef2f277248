"""Messages among members of a run in a world of cores, in addition to those of the cores.

Only their time and bytes are modelled. They never go on a wire, so they have no signatures and no limits.
"""

from dataclasses import dataclass, field

from partition.plan.plan import NO_HASH
from partition.run.asks import Request

MESSAGE_BYTES = 256
"""The size of a message on the network; most contain names of plans and a few numbers."""
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
    """The data of one run on one peer's disk, kept across restarts. `chain` is empty while the peer is not a
    member; `copies` are keyed by step and original stage."""

    chain: bytes = b""
    newest: tuple[bytes, int] | None = None
    copies: dict[tuple[int, int], object] = field(default_factory=dict)

    def forget_chain(self) -> None:
        """Forget the chain of an unfinished run, but keep its checkpoints."""
        self.chain = b""


def checkpoint_name(run: bytes, step: int) -> bytes:
    """Return the name of the state after a step; it is the same for all peers that save it."""
    return bytes(left ^ right for left, right in zip(run, step.to_bytes(len(NO_HASH), "big"), strict=True))
