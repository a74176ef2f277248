"""Messages among members of a run in a world of cores, beside those of the cores.

Only what takes its time or its bytes: never on a wire, so without signatures and limits.
"""

from dataclasses import dataclass, field

from crypto.identity import PeerId
from partition.plan.plan import NO_HASH
from partition.run.asks import Request

MESSAGE_BYTES = 256
"""The size of a message on the network: most are names of plans and some numbers."""
STATE_BYTES = 64 * 1024
"""The size of a stage's state on the network."""


# On the ordered streams


@dataclass(frozen=True)
class Noted:
    """Committer to the others: so many steps are committed."""

    plan: bytes
    step: int


@dataclass(frozen=True)
class Saved:
    """Replica to committer: my stage as it was after `step` steps is put away here."""

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
class ExportStage:
    """Committer to replica: the state you end with."""

    plan: bytes


@dataclass(frozen=True)
class KeepCopy:
    """Committer to a keeper: hold what `holder` has put away of a stage that is made of these."""

    step: int
    units: tuple[int, ...]
    holder: PeerId


@dataclass(frozen=True)
class FetchCopy:
    """Anybody to anybody: the copy of one of the stages that the run began with."""

    step: int
    unit: int


Question = Request | FetchState | ExportStage | KeepCopy | FetchCopy


# On disks


@dataclass
class Disk:
    """The records of one run that one peer keeps over a restart. `chain` is empty while it is not a member;
    `copies` are by step, and stage that the run began with."""

    chain: bytes = b""
    newest: tuple[bytes, int] | None = None
    copies: dict[tuple[int, int], object] = field(default_factory=dict)

    def forget_chain(self) -> None:
        """Forget the records of a running run; its copies stay."""
        self.chain, self.newest = b"", None


def checkpoint_name(run: bytes, step: int) -> bytes:
    """Return one name for one state: that of a step is the same, whichever member saved it."""
    return bytes(left ^ right for left, right in zip(run, step.to_bytes(len(NO_HASH), "big"), strict=True))
