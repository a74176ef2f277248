"""How the members of a run in local mode agree on its end: a sans-IO core, one for each run.

There is no plan to decide on. One member evaluates: of those that have a state, the one nearest to the hash
of the run, so that its death makes the next one evaluate, as its silence does after a while. When the series
has converged, or the steps are done, it keeps the model and proposes a conclusion, which names that model by
its hash.

1. Who hears of a conclusion from one that holds its result prefers it to a worse one (`_rank`), fetches that
result, and says so to all.
2. Once every member in sight says that it holds the same conclusion, it is settled here. A settled member
never changes its mind, and a member that hears of a settled conclusion takes it.
3. A conclusion whose author and holders are all gone before anybody else held the result is void, and so is
one whose result nobody hands over; those who say that they hold it are not listened to any more.
4. A failure is no conclusion for a member that can go on by itself (`can_go_on`).
5. Nobody's word is taken for a result: before a member holds one, its shell evaluates it itself. An
evaluation counts only from the member whose turn it is, and the series is continued here from its loss.

So members that see one another settle one conclusion. Two sides of a partition that lasts beyond the patience
settle two; each keeps its own, and the difference is counted. Not here: what a model is, and fetching it.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice
from math import inf, isfinite
from typing import Annotated, Literal, assert_never

import msgspec
from blake3 import blake3

from crypto.errors import RemoteProtocolError
from crypto.identity import PEER_ID_BYTES, PeerId
from partition.run import admission as admissions
from partition.run.admission import Admission, Present, Vouch
from partition.run.convergence import Progress, advance, has_converged
from partition.run.local_settings import LocalSettings
from partition.run.messages import REASON_LENGTH_MAX
from partition.stage import METRICS_MAX

PROTOCOL = "/peerloom/local/1"
MESSAGE_BYTES_MAX = 16_384
"""A full chain of tickets takes some 7 KiB; all else fits a datagram."""
SAY_SECONDS = 0.5
"""Between two tellings of a conclusion to members that have not answered with it."""
PATIENCE_SECONDS = 30.0
"""A member that holds a conclusion waits so long at most for the others to hold it too."""
GRACE_SECONDS = 12.0
"""A member that fell out of sight is still waited for so long: on a busy machine the living look dead too."""
TURN_SECONDS = 60.0
"""An evaluation that is due is another member's to make after so long. Longer than most take: one made twice
costs its time and no more."""
LINGER_SECONDS = 600.0
"""A run that is over answers members that were away for so long."""
TURN_SLACK_SECONDS = 10.0
"""What members may differ in since when an evaluation has been due."""
REFUSED_MAX = 64
"""Conclusions, and peers, that a member does not listen to any more."""
RUNS_MAX = 64

Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Subject = Annotated[bytes, msgspec.Meta(min_length=PEER_ID_BYTES, max_length=PEER_ID_BYTES)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class Evaluated(msgspec.Struct, frozen=True, array_like=True, tag="evaluated"):
    """The held-out loss of the sender's model at a step, and the series up to there."""

    run: Hash
    step: Count
    samples: Count
    loss: float
    metrics: Annotated[tuple[float, ...], msgspec.Meta(max_length=METRICS_MAX)]
    best: float
    since: Count


class Conclusion(msgspec.Struct, frozen=True, array_like=True):
    """The end of a run. `weights` is the BLAKE3 hash (hex) of the result, "" for a run that failed."""

    run: Hash
    outcome: Literal["done", "failed"]
    reason: Annotated[str, msgspec.Meta(max_length=REASON_LENGTH_MAX)]
    step: Count
    weights: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")]
    author: Subject


class Said(msgspec.Struct, frozen=True, array_like=True, tag="said"):
    """The conclusion that the sender prefers; whether it holds its result, and is settled there."""

    run: Hash
    conclusion: Conclusion
    holds: bool
    is_settled: bool


Told = Evaluated | Said
Message = Told | admissions.Message
Sends = list[tuple[PeerId, Told]]
AllSends = list[tuple[PeerId, Message]]


@dataclass(frozen=True)
class EvaluationHeard:
    """Another member has evaluated."""

    run: bytes
    evaluated: Evaluated


@dataclass(frozen=True)
class Preferred:
    """This conclusion is the best known. Its result is at the `holders`: fetch it, then call `hold`."""

    run: bytes
    conclusion: Conclusion


@dataclass(frozen=True)
class Voided:
    """Nobody is left who holds the result of the conclusion that was preferred: the run goes on."""

    run: bytes


@dataclass(frozen=True)
class Settled:
    """The run is over by this conclusion."""

    run: bytes
    conclusion: Conclusion


@dataclass(frozen=True)
class Admitted:
    """This peer is a member of the run."""

    run: bytes
    peer: PeerId


Event = EvaluationHeard | Preferred | Voided | Settled | Admitted


def _rank(conclusion: Conclusion) -> tuple[bool, int, bytes, str]:
    """Lower is better: a result, of the most steps, then by author."""
    return conclusion.outcome != "done", -conclusion.step, conclusion.author, conclusion.weights


class Ending:
    """One run, as one member sees it."""

    def __init__(self, me: PeerId, run: bytes, settings: LocalSettings, steps: int = 2**53 - 1) -> None:
        """`steps` are those of the run: nobody has made more."""
        self.run = run
        self.progress = Progress()
        self.best: Conclusion | None = None
        self.holds = False
        self.is_settled = False
        self.differing = 0
        """Other conclusions that were settled elsewhere."""
        self.is_here = False
        """Whether the result of the preferred conclusion has been fetched, though it is not held yet."""
        self.can_go_on = False
        """Whether this member trains and its numbers are finite."""
        self.events: list[Event] = []
        self._me = me
        self._settings = settings
        self._steps = steps
        self._trainers: frozenset[PeerId] | None = None
        self._due_at = inf
        self._peers: frozenset[PeerId] = frozenset()
        self._unseen: dict[PeerId, float] = {}
        self._said: dict[PeerId, Said] = {}
        self._refused: set[Conclusion] = set()
        self._liars: set[PeerId] = set()
        self._say_at = inf
        self._settle_at = inf
        self.forget_at = inf

    @property
    def deadline(self) -> float:
        if self.best is None or self.is_settled:
            return inf
        return min(self._say_at, self._settle_at)

    @property
    def has_converged(self) -> bool:
        """Whether the series has stopped improving by the manifest's rule."""
        return has_converged(self.progress, self._settings.patience)

    def is_evaluator(self, others: Iterable[PeerId]) -> bool:
        """Return whether this member is the first to evaluate, `others` being those that have a state."""
        return self.evaluates(others, 0.0)

    def evaluates(self, others: Iterable[PeerId], waited_seconds: float) -> bool:
        """Return whether this member evaluates, what is due having been due for so long.

        The nearest to the hash of the run does at once, each of the others `TURN_SECONDS` after the one
        before: a member that is there and does not evaluate delays the end, and cannot prevent it.
        """
        return waited_seconds >= TURN_SECONDS * self._rank(self._me, others)

    def _rank(self, peer: PeerId, others: Iterable[PeerId]) -> int:
        own = blake3(self.run + peer).digest()
        return sum(blake3(self.run + other).digest() < own for other in others)

    def _is_turn(self, now: float, sender: PeerId) -> bool:
        """Return whether it may be another member's turn to evaluate."""
        if self._trainers is None:
            return True
        rank = self._rank(sender, self._trainers)
        return rank == 0 or now - self._due_at >= TURN_SECONDS * rank - TURN_SLACK_SECONDS

    def set_due(self, now: float, waited_seconds: float) -> Sends:
        """An evaluation has been due here for so long; below 0: none is."""
        self._due_at = inf if waited_seconds < 0 else now - waited_seconds
        return []

    def set_peers(
        self, now: float, peers: Collection[PeerId], trainers: Collection[PeerId] | None = None
    ) -> Sends:
        """These take part, this member not counted; `trainers` are those that have a state, this member
        too where it has one. None: whoever evaluates is believed that it is its turn."""
        if trainers is not None:
            self._trainers = frozenset(trainers)
        found = frozenset(peers) - {self._me}
        self._unseen |= dict.fromkeys(self._peers - found, now)
        self._unseen = {
            peer: at for peer, at in self._unseen.items() if peer not in found and now - at < GRACE_SECONDS
        }
        self._peers = found
        self._said = {
            peer: said for peer, said in self._said.items() if peer in found or peer in self._unseen
        }
        self._void()
        return self._settle(now)

    def evaluate(self, step: int, samples: int, loss: float, metrics: tuple[float, ...]) -> Sends:
        """Add this member's own evaluation to the series, and tell all."""
        self.progress = advance(self.progress, step, loss, self._settings.improvement)
        message = Evaluated(self.run, step, samples, loss, metrics, self.progress.best, self.progress.since)
        return [(peer, message) for peer in self._peers]

    def propose(self, now: float, conclusion: Conclusion) -> Sends:
        """As the evaluator, which holds the result."""
        if self.best is not None:
            return []
        self.best, self.holds = conclusion, True
        self._say_at, self._settle_at = now, now + PATIENCE_SECONDS
        return self.wake(now)

    def hold(self, now: float, conclusion: Conclusion) -> Sends:
        """The result of a preferred conclusion is here now, or needs none, or cannot be had at all."""
        if conclusion != self.best or self.holds:
            return []
        self.holds = True
        self._say_at, self._settle_at = now, now + PATIENCE_SECONDS
        return self.wake(now)

    def fetched(self, conclusion: Conclusion) -> Sends:
        """The result of a preferred conclusion is here, and will be looked at."""
        self.is_here = self.is_here or conclusion == self.best
        return []

    def give_up(self, conclusion: Conclusion) -> Sends:
        """Nobody hands the result of a preferred conclusion over, or it is none: go on without it."""
        if conclusion == self.best and not self.holds:
            if len(self._refused) < REFUSED_MAX:
                self._refused.add(conclusion)
                said = (
                    peer for peer, said in self._said.items() if said.holds and said.conclusion == conclusion
                )
                self._liars.update(islice(said, REFUSED_MAX - len(self._liars)))
            self._drop()
        return []

    def receive(self, now: float, sender: PeerId, message: Told) -> Sends:
        """Take one message. Raises RemoteProtocolError for numbers that are none."""
        match message:
            case Evaluated():
                return self._take_evaluation(now, sender, message)
            case Said():
                return self._take_conclusion(now, sender, message)
            case _:
                assert_never(message)

    def wake(self, now: float) -> Sends:
        """Say what is to be said again, and settle when the patience is over."""
        sends: Sends = []
        if self.best is not None and not self.is_settled and now >= self._say_at:
            self._say_at = now + SAY_SECONDS
            own = self._own()
            sends = [(peer, own) for peer in self._awaited(now)]
        return sends + self._settle(now)

    def _take_evaluation(self, now: float, sender: PeerId, message: Evaluated) -> Sends:
        if not all(isfinite(number) for number in (message.loss, message.best, *message.metrics)):
            raise RemoteProtocolError("an evaluation that is not finite")
        if message.step > self._steps:
            raise RemoteProtocolError("an evaluation of a step that the run does not have")
        if self.is_settled:
            return [(sender, self._own())]
        if sender not in self._peers or message.step < self.progress.step or not self._is_turn(now, sender):
            return []
        if self.progress.step < 0:  # whoever came late goes on with the series as it is told
            self.progress = Progress(message.step, min(message.best, message.loss), message.since)
        else:
            self.progress = advance(self.progress, message.step, message.loss, self._settings.improvement)
        self.events.append(EvaluationHeard(self.run, message))
        return []

    def _take_conclusion(self, now: float, sender: PeerId, message: Said) -> Sends:
        if message.conclusion.run != self.run or (message.conclusion.outcome == "done") != bool(
            message.conclusion.weights
        ):
            raise RemoteProtocolError("a conclusion of another run, or without its result")
        if message.conclusion.step > self._steps:
            raise RemoteProtocolError("a conclusion at a step that the run does not have")
        if self.is_settled:
            if message.conclusion != self.best:
                self.differing += message.is_settled
            return [] if message.is_settled else [(sender, self._own())]
        if sender not in self._peers and sender not in self._unseen:
            return []  # who takes no part here, or is not known to yet, says it again
        if sender in self._liars or message.conclusion in self._refused:
            return []
        if message.conclusion.outcome == "failed" and self.can_go_on:
            return []
        self._said[sender] = message
        best, new = self.best, message.conclusion
        is_better = best is None or (new != best and (message.is_settled or _rank(new) < _rank(best)))
        sends: Sends = []
        if is_better and not message.holds:
            pass  # whoever holds it says so: only those who do answer for it
        elif is_better:
            self.best, self.holds, self.is_here = new, False, False
            self._say_at, self._settle_at = now + SAY_SECONDS, inf
            self.events.append(Preferred(self.run, new))
        elif new != best:
            sends = [(sender, self._own())]
        return sends + self._settle(now)

    @property
    def holders(self) -> tuple[PeerId, ...]:
        """The members that have the result of the preferred conclusion, in sight or just fallen out of it."""
        if self.best is None:
            return ()
        said = (peer for peer, said in self._said.items() if said.holds and said.conclusion == self.best)
        found = dict.fromkeys((PeerId(self.best.author), *said))
        return tuple(peer for peer in found if peer in self._peers or peer in self._unseen)

    def _void(self) -> None:
        """Give a conclusion up whose result went with its author."""
        if self.best is None or self.holds or self.is_here or self.is_settled or self.holders:
            return
        self._drop()

    def _drop(self) -> None:
        self.best, self.is_here = None, False
        self._say_at = self._settle_at = inf
        self._said.clear()
        self.events.append(Voided(self.run))

    def _settle(self, now: float) -> Sends:
        best = self.best
        if best is None or self.is_settled or not self.holds:
            return []
        said = [self._said.get(peer) for peer in self._awaited(now)]
        agree = all(each is not None and each.conclusion == best and each.holds for each in said)
        if not agree and now < self._settle_at:
            return []
        self.is_settled = True
        self._say_at = self._settle_at = inf
        self.forget_at = now + LINGER_SECONDS
        self.events.append(Settled(self.run, best))
        own = self._own()
        return [(peer, own) for peer in self._awaited(now)]

    def _awaited(self, now: float) -> list[PeerId]:
        """The members whose word counts: those in sight, and those that just fell out of it."""
        unseen = (peer for peer, at in self._unseen.items() if now - at < GRACE_SECONDS)
        return sorted({*self._peers, *unseen} - self._liars)

    @property
    def said(self) -> Said:
        """What this member says of the end; there is a conclusion."""
        return self._own()

    def _own(self) -> Said:
        assert self.best is not None, "there is a conclusion"
        return Said(self.run, self.best, self.holds, self.is_settled)


def _forgotten_at(ending: Ending) -> float:
    return ending.forget_at


class Endings:
    """All runs in local mode of one node, behind one protocol; those that are over too, for a while.

    What is said of an end goes to its `Ending`, tickets to its `Admission`.
    """

    def __init__(self) -> None:
        self._endings: dict[bytes, Ending] = {}
        self._admissions: dict[bytes, Admission] = {}
        self.events: list[Event] = []

    @property
    def deadline(self) -> float:
        return min((ending.deadline for ending in self._endings.values()), default=inf)

    def open(self, now: float, ending: Ending, admission: Admission | None = None) -> None:
        """Take part. Of runs that are over, those that ended first make room. Raises ValueError: in too many
        runs that are not."""
        over = sorted((other for other in self._endings.values() if other.is_settled), key=_forgotten_at)
        for other in over:
            if other.forget_at <= now or len(self._endings) >= RUNS_MAX:
                self.close(other.run)
        if len(self._endings) >= RUNS_MAX:
            raise ValueError(f"a node remembers {RUNS_MAX} runs in local mode at most")
        self._endings[ending.run] = ending
        if admission is not None:
            self._admissions[ending.run] = admission

    def close(self, run: bytes) -> None:
        """Forget a run: this node takes no part any more."""
        self._endings.pop(run, None)
        self._admissions.pop(run, None)

    def receive(self, now: float, sender: PeerId, message: Message) -> AllSends:
        """Take one message; one of a run that is not known here is passed over."""
        ending, admission = self._endings.get(message.run), self._admissions.get(message.run)
        if ending is None:
            return []
        if isinstance(message, Present | Vouch):
            if admission is None:
                return []
            sends = self.admitted(admission, admission.receive(sender, message))
            # A member that comes back to a run that is over hears of it.
            return sends + ([(sender, ending.said)] if sends and ending.is_settled else [])
        return self.drained(ending, ending.receive(now, sender, message))

    def admitted(self, admission: Admission, sends: admissions.Sends) -> AllSends:
        """Return `sends`, with who was found to be a member put among the events."""
        self.events += [Admitted(admission.run, peer) for peer in admission.events]
        admission.events.clear()
        return [*sends]

    def wake(self, now: float) -> AllSends:
        """Wake those that are due."""
        sends: AllSends = []
        for ending in self._endings.values():
            if ending.deadline <= now:
                sends += self.drained(ending, ending.wake(now))
        return sends

    def drained(self, ending: Ending, sends: Sends) -> AllSends:
        """Return `sends`, with what a call to one ending taught put among the events."""
        self.events += ending.events
        ending.events.clear()
        return [*sends]
