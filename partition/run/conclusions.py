"""Messages and events about the end of a run in local mode.

`partition.run.ending` has the agreement itself.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from crypto.identity import PEER_ID_BYTES, PeerId
from partition.run import admission as admissions
from partition.run.messages import REASON_LENGTH_MAX
from partition.stage import METRICS_MAX

PROTOCOL = "/peerloom/local/1"
MESSAGE_BYTES_MAX = 16_384
"""Limit on the size of a message. A full chain of tickets takes about 7 KiB; every other message fits into a
datagram."""
Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Subject = Annotated[bytes, msgspec.Meta(min_length=PEER_ID_BYTES, max_length=PEER_ID_BYTES)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class ModelEvaluated(msgspec.Struct, frozen=True, array_like=True, tag="evaluated"):
    """The held-out loss of the sender's model at a step, and the state of the series of evaluations up to
    that step."""

    run: Hash
    step: Count
    samples: Count
    loss: float
    metrics: Annotated[tuple[float, ...], msgspec.Meta(max_length=METRICS_MAX)]
    best: float
    since: Count


class Conclusion(msgspec.Struct, frozen=True, array_like=True):
    """The end of a run. `weights` is the BLAKE3 hash (hex) of the result, "" if the run failed."""

    run: Hash
    outcome: Literal["done", "failed"]
    reason: Annotated[str, msgspec.Meta(max_length=REASON_LENGTH_MAX)]
    step: Count
    weights: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")]
    author: Subject


class Said(msgspec.Struct, frozen=True, array_like=True, tag="said"):
    """The conclusion that the sender prefers. `holds`: the sender has its result and accepts it;
    `is_settled`: the run is over for the sender; `commits`: the sender commits to the conclusion. A member
    commits to at most one conclusion."""

    run: Hash
    conclusion: Conclusion
    holds: bool
    is_settled: bool
    commits: bool = False


class ConclusionRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The sender rejects this conclusion: its result is invalid or was not handed over, or too few members
    accept it."""

    run: Hash
    conclusion: Conclusion


Told = ModelEvaluated | Said | ConclusionRefused
Message = Told | admissions.Message
Sends = list[tuple[PeerId, Told]]
AllSends = list[tuple[PeerId, Message]]


@dataclass(frozen=True)
class EvaluationHeard:
    """Another member has evaluated its model."""

    run: bytes
    evaluated: ModelEvaluated


@dataclass(frozen=True)
class Preferred:
    """This conclusion is preferred from now on. The members in `Ending.holders` have its result: fetch the
    result, then call `Ending.hold`."""

    run: bytes
    conclusion: Conclusion


@dataclass(frozen=True)
class Voided:
    """The preferred conclusion was given up: no holder of its result is left, or it was refused. The run goes
    on."""

    run: bytes


@dataclass(frozen=True)
class Settled:
    """The run ended with this conclusion."""

    run: bytes
    conclusion: Conclusion


@dataclass(frozen=True)
class Differs:
    """The run is over here with `conclusion`, and `peer` reports that it ended with `other`."""

    run: bytes
    conclusion: Conclusion
    other: Conclusion
    peer: PeerId


Event = EvaluationHeard | Preferred | Voided | Settled | Differs | admissions.Event


def rank(conclusion: Conclusion) -> tuple[bool, int, bytes, str]:
    """Return the sort key of a conclusion; lower is better. Conclusions with a result come first, then those
    with more steps, then by author."""
    return conclusion.outcome != "done", -conclusion.step, conclusion.author, conclusion.weights


def says_held(said: Said, conclusion: Conclusion) -> bool:
    """Return whether the sender of this message holds the result of the conclusion."""
    return said.holds and said.conclusion == conclusion


def says_committed(said: Said, conclusion: Conclusion) -> bool:
    """Return whether the sender of this message has committed to the conclusion or settled on it."""
    return (said.commits or said.is_settled) and says_held(said, conclusion)
