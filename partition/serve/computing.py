"""Orders from a provider's core to its stages. The driver carries them out one after the other."""

from dataclasses import dataclass

from partition.codecs.codec import Typed
from partition.serve.messages import UnitWork


@dataclass(frozen=True)
class BatchUnit:
    """A unit in the form in which the stage computes it."""

    session: bytes
    work: UnitWork
    arrays: tuple[Typed, ...]


@dataclass(frozen=True)
class ComputeBatch:
    """Make a stage of a service compute these units together. The driver reports the result under the number
    `batch`."""

    service: bytes
    stage: int
    batch: int
    units: tuple[BatchUnit, ...]


@dataclass(frozen=True)
class ForgetSession:
    """Make a stage forget a session."""

    service: bytes
    stage: int
    session: bytes


@dataclass(frozen=True)
class ForkSession:
    """Make a stage begin a session with the first tokens of another session, before any later work."""

    service: bytes
    stage: int
    session: bytes
    base: bytes
    tokens: int


Event = ComputeBatch | ForgetSession | ForkSession
