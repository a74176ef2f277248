"""Messages among members of a run in a world of cores, beside those of the cores.

Modelled by their time and bytes alone: they never go on a wire, so they have no signatures and limits.
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
    """Replica to committer: my stage after `step` steps is stored here."""

    plan: bytes
    step: int
    stage: int


# Questions


@dataclass(frozen=True)
class FetchState:
    """Newcomer to a replica of its stage: your state after `step` steps."""

    plan: bytes
    step: int


@dataclass(frozen=True)
class FetchCopy:
    """Anybody to anybody: the copy of one of the run's original stages."""

    step: int
    unit: int


Question = Request | FetchState | FetchCopy


# On disks


@dataclass
class Disk:
    """The records of one run at one peer, kept over a restart. `chain` is empty while it is not a member;
    `copies` are by step and original stage."""

    chain: bytes = b""
    newest: tuple[bytes, int] | None = None
    copies: dict[tuple[int, int], object] = field(default_factory=dict)

    def forget_chain(self) -> None:
        """Forget the chain of a running run; its checkpoints stay."""
        self.chain = b""


def checkpoint_name(run: bytes, step: int) -> bytes:
    """Return the name of the state of a step, the same whichever member saved it."""
    return bytes(left ^ right for left, right in zip(run, step.to_bytes(len(NO_HASH), "big"), strict=True))
