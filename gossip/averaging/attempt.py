"""One attempt to average vectors in a known group, as a sans-IO core.

1. Scatter: each member with tensors sends every owner the chunks of that owner's part, then its signed
   commitment to all: the root of each part, and its weight.
2. Have: an owner signs the set of members whose parts it holds and has checked: all senders, or those that
   came in time. It signs only one such have-set.
3. Commit: the set S is what *all* owners hold, under equal commitments; the hash of all have-sets names the
   commit. So no member decides S: every holder of the have-sets computes it and its weights, bounded by their
   median (`gossip.averaging.weights`).
4. Reduce and gather: an owner reduces exactly S, sends its part to all and seals it with a signature. Members
   hand sealed parts on to others that lack them.
5. Agree: a member that holds all parts, sealed under one commit, sends all their digest. It succeeds once the
   others have sent the same, or have been silent for a while. Two members with different bytes send each
   other the facts behind them. Two facts of one owner among these are proof of a lie, and both members fail.

So all members that report success hold the same bytes and the same S, even if an owner signs twice, unless
messages between them take longer than the wait in step 5. All others keep their old tensors. If an owner is
lost, the attempt fails; the next attempt has a new number and new nonces. Based on Moshpit SGD (Ryabinin et
al. 2021, section 3.2), which has no commitments and no have-sets and can leave members with different means.

In an exchange (`Terms.mode`) every member owns the whole vector: it holds every payload, and step 4 is local
arithmetic.
"""

from collections.abc import Collection, Mapping, Sequence
from math import inf
from typing import assert_never

import numpy as np
from blake3 import blake3

from crypto.encoding import decode, encode
from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.facts import Fact, Signer
from crypto.identity import PeerId
from gossip.averaging.aggregates import counted_weights, reduction_of
from gossip.averaging.agreement import Agreement
from gossip.averaging.arrivals import Arrivals
from gossip.averaging.codecs import Codec, codec_of
from gossip.averaging.first_signs import FirstSigns
from gossip.averaging.gather import Gather
from gossip.averaging.group import Group, fault_of, is_weight, owners_of
from gossip.averaging.messages import (
    CHUNKS_ASKED_MAX,
    COMMITMENT_PURPOSE,
    FACT_BODY_BYTES_MAX,
    HAVE_PURPOSE,
    SEAL_PURPOSE,
    Arrived,
    AttemptMessage,
    Chunk,
    ChunkRequest,
    Commitment,
    CommitmentBody,
    Have,
    HaveBody,
    HeldPart,
    Holding,
    Seal,
    SealBody,
    Withdraw,
)
from gossip.averaging.outcome import Averaged, Equivocation, NotAveraged, Patience, Reason
from gossip.averaging.parts import chunk_count
from gossip.averaging.questions import Questions
from gossip.averaging.robust.reduction import Vector
from gossip.averaging.scatter import Scatter, check_vector
from gossip.averaging.statements import Statements

Sends = list[tuple[PeerId, AttemptMessage]]
STALL_SECONDS = 1.0
"""If `wake` comes this long after its deadline, this machine has stalled, so the others are not late."""


class Attempt:
    """One member's side of one attempt.

    `vector` is flat and has the group's type and size, or is None for a member without tensors; it must not
    change before `result` is set. `start`, `receive`, `wake`, `lost` and `cancel` return small messages.
    Chunks are pulled, one per call, as fast as the stream to that peer accepts them (`pull`, `ready`).
    `codecs` are the user's own codecs, in addition to those of `gossip.averaging.codecs`. No member waits for
    `silent` peers to declare their result, because they did not declare one in the previous attempt. Raises
    ValueError if the group or vector is invalid.

    Long because it is one state machine: every message may arrive in every phase, which must handle it.
    """

    def __init__(
        self,
        signer: Signer,
        group: Group,
        vector: Vector | None,
        weight: float,
        now: float,
        patience: Patience | None = None,
        codecs: Mapping[str, Codec] | None = None,
        silent: Collection[PeerId] = (),
    ) -> None:
        if fault := fault_of(group):
            raise ValueError(fault)
        if signer.peer not in group.peers:
            raise ValueError("this peer is not in the group")
        self._signer = signer
        self.group = group
        self.id = group.id
        self._peers = group.peers
        self._place = self._peers.index(signer.peer)
        self._others = [place for place in range(len(self._peers)) if place != self._place]
        self._codec = codec_of(group.terms.codec, group.terms.dtype, codecs)
        check_vector(group, self._place, self._codec, vector, weight)
        self._patience = patience or Patience()
        self._owners = {owner.place: owner for owner in owners_of(group)}
        self._scatter = Scatter(group, self._owners, self._place, self._codec, vector, weight)
        self._gather = Gather(group, self._owners, self._place, self._codec)
        self._lost: dict[int, None] = {}
        self._silent: set[int] = set()
        self._begun: set[int] = set()
        self._unsent: tuple[int, ...] = ()
        # Chunks to send to each place, as (is it reduced, owner, number). Dictionaries keep their order.
        self._queues: dict[int, dict[tuple[bool, int, int], None]] = {place: {} for place in self._others}
        self._statements = Statements(signer, self._peers, self._place)
        self._haves: dict[int, HaveBody] = {}
        self._set: tuple[HeldPart, ...] = ()
        self._questions = Questions(sum(map(chunk_count, self._owners.values())))
        unawaited = [place for place in self._others if self._peers[place] in silent]
        self._agreement = Agreement(self._others, unawaited)
        self._signs = FirstSigns(self._others, self._patience.unheard_seconds, now)
        self.result: Averaged | NotAveraged | None = None
        self.is_closed = False
        self.has_stood_still = False
        """Whether this machine was stopped during the attempt, for example by a debugger or by suspend."""
        self.received_bytes = self.sent_bytes = 0
        self._now = self._progress_at = now
        self._scatter_until = now + self._patience.scatter_seconds
        self._phase_until = self._scatter_until + self._patience.commit_seconds
        self._ask_at = self._close_at = inf
        self._arrivals = Arrivals(self.id, now)

    # Queries

    @property
    def deadline(self) -> float:
        """The time of the next `wake`; inf once closed."""
        if self.is_closed:
            return inf
        if self.result is not None:
            return self._close_at
        unheard_at = self._signs.until(self._lost)
        if self._is_scattering:
            return min(self._scatter_until, self._stall_at, unheard_at)
        if self._agreement.digest:
            return self._agreement.until
        stall_at = self._stall_at if self._gather.commit else inf
        return min(self._phase_until, stall_at, self._ask_at, unheard_at)

    @property
    def ready(self) -> tuple[PeerId, ...]:
        """The peers for which `pull` has a message."""
        return tuple(self._peers[place] for place, queue in self._queues.items() if queue)

    @property
    def awaited(self) -> tuple[PeerId, ...]:
        """The peers that this member waits for, for display."""
        if self.result is not None:
            return ()
        if self._is_scattering:
            places = self._unsettled()
        elif not self._gather.commit:
            places = [place for place in self._owners if place not in self._haves]
        elif self._agreement.digest:
            places = self._agreement.awaited(self._lost)
        else:
            places = list(self._gather.incomplete)
        return tuple(self._peers[place] for place in places)

    @property
    def upload_rate(self) -> float | None:
        """Measured upload of this member in bytes per second; None if no member has reported it."""
        return self._arrivals.upload_rate

    @property
    def came(self) -> Mapping[PeerId, int]:
        """The number of tensor bytes received from each member."""
        return {self._peers[place]: size for place, size in self._arrivals.sizes.items()}

    @property
    def undeclared(self) -> tuple[PeerId, ...]:
        """The members that have not declared a result, except lost ones."""
        return tuple(self._peers[place] for place in self._agreement.undeclared(self._lost))

    @property
    def equivocations(self) -> Sequence[Equivocation]:
        """The proofs that a member lied."""
        return tuple(self._statements.equivocations.values())

    @property
    def excluded(self) -> tuple[PeerId, ...]:
        """The members with tensors that the commit leaves out; empty until the commit is known."""
        if not self._gather.commit:
            return ()
        held = [entry.place for entry in self._set]
        return tuple(self._peers[place] for place in self._scatter.senders if place not in held)

    @property
    def unsent(self) -> tuple[PeerId, ...]:
        """The members with tensors whose part did not arrive here in time. A member that reduces nothing
        returns those that are not in the commit and whose commitment did not arrive. Only arrivals at this
        member count as evidence, because what others hold is only their claim."""
        return tuple(self._peers[place] for place in self._unsent)

    def has_begun(self, peer: PeerId) -> bool:
        """Return whether this member sent any tensor data."""
        return self._place_of(peer) in self._begun

    # Input

    def start(self, now: float) -> Sends:
        """Start sending. Call it once."""
        self._now = self._progress_at = self._signs.begun_at = now
        self._arrivals = Arrivals(self.id, now)
        if self._scatter.has_tensors:
            for place, owner in self._owners.items():
                if place in self._queues:
                    chunks = range(chunk_count(owner))
                    self._queues[place] = dict.fromkeys((False, place, number) for number in chunks)
            if not any(self._queues.values()):
                return self._commit_own() + self._advance()
        return self._advance()

    def pull(self, now: float, peer: PeerId) -> Sends:
        """Return the next chunk for this peer and any due messages; nothing if it is not `ready`."""
        self._now = now
        queue = self._queues[self._place_of(peer)]
        if not queue:
            return []
        is_reduced, place, number = next(iter(queue))
        del queue[is_reduced, place, number]
        if is_reduced and place == self._place and not self._gather.reduce_to(number):
            return self._fail(Reason.NOT_FINITE)
        chunk = (self._gather if is_reduced else self._scatter).chunk(place, number)
        self.sent_bytes += chunk.data.nbytes
        sends: Sends = [(peer, chunk)]
        if not queue and not is_reduced:
            sends += self._commit_own() + self._advance()
        elif not queue and place == self._place:
            sends += self._seal() + self._advance()
        return sends

    def receive(self, now: float, sender: PeerId, message: AttemptMessage) -> Sends:
        """Handle one message. Raises RemoteProtocolError for a message that no correct member sends."""
        self._now = now
        if message.attempt != self.id:
            raise RemoteProtocolError("a message of another attempt")
        place = self._place_of(sender)
        if self.is_closed:
            return []
        self._signs.note(place, now)
        match message:
            case Chunk():
                self._begun.add(place)
                self._take_chunk(place, message)
            case Commitment(fact=fact):
                self._take_commitment(place, fact)
            case Have(fact=fact):
                self._take_have(fact)
            case Seal(fact=fact):
                self._take_seal(fact)
            case ChunkRequest():
                return self._answer(place, message)
            case Holding(digest=digest):
                if self._agreement.take(place, digest):
                    return self._tell_facts(place)
            case Withdraw():
                return self.lost(now, sender)
            case Arrived():
                self._arrivals.take(place, message, self.sent_bytes)
            case _:
                assert_never(message)
        return self._advance()

    def opened(self, now: float, peer: PeerId) -> Sends:
        """Record that this peer has opened a stream for this attempt, so it is present."""
        self._now = now
        self._signs.note(self._place_of(peer), now)
        return []

    def lost(self, now: float, peer: PeerId) -> Sends:
        """Stop waiting for a peer that is unreachable or dead, or has withdrawn."""
        self._now = now
        place = self._place_of(peer)
        if self.is_closed or place in self._lost:
            return []
        self._lost[place] = None
        self._queues[place].clear()
        if self.result is not None:
            return []
        if place in self._owners and self._is_scattering:
            # The lost owner cannot have reduced anything without this member's have-set.
            return self._fail(Reason.OWNER_LOST, place, *self._overdue)
        if place in self._owners:
            # Others may hold the lost peer's last messages. So ask them immediately, and do not wait long.
            self._ask_at = now
            if place not in self._haves:
                self._phase_until = min(self._phase_until, now + 3 * self._patience.ask_seconds)
        sends: Sends = []
        if not self._scatter.is_committed and not any(self._queues.values()):
            sends += self._commit_own()
        return sends + self._advance()

    def cancel(self, now: float) -> Sends:
        """Withdraw. If there is a result already, only stop passing it on."""
        self._now = now
        if self.result is None:
            return self._fail(Reason.CANCELLED)
        self._close()
        return []

    def wake(self, now: float) -> Sends:
        """Do everything that is due at `now`."""
        self._now = now
        if self.is_closed or now < self.deadline:
            return []
        if self.result is not None:
            self._close()
            return []
        if now - self.deadline > STALL_SECONDS and not self.has_stood_still:
            self._make_up_for(now - self.deadline)
            return []
        if self._agreement.digest:
            return self._succeed()
        if now >= self._signs.until(self._lost):
            return self._lose_unheard()
        if self._is_scattering:
            return self._say_have() + self._advance()
        if self._gather.commit and now >= min(self._phase_until, self._stall_at):
            return self._fail(Reason.INCOMPLETE, *self._gather.incomplete)
        if now >= self._phase_until:
            return self._fail(Reason.NO_HAVE_SETS, *(p for p in self._owners if p not in self._haves))
        return self._ask() + self._advance()

    def _make_up_for(self, seconds: float) -> None:
        """Extend the deadlines by a stall, at most once per attempt: otherwise an attempt might never end on
        a slow machine."""
        self.has_stood_still = True
        self._scatter_until += seconds
        self._phase_until += seconds
        self._progress_at += seconds
        self._ask_at += seconds
        self._agreement.until += seconds
        self._signs.begun_at += seconds

    def _lose_unheard(self) -> Sends:
        sends: Sends = []
        self._silent.update(unheard := self._signs.missing(self._lost))
        for place in unheard:
            if self.result is None:
                sends += self.lost(self._now, self._peers[place])
        return sends

    # Scatter

    @property
    def _is_scattering(self) -> bool:
        """Whether this member is an owner that has not signed its have-set yet."""
        return self._place in self._owners and self._place not in self._haves

    @property
    def _stall_at(self) -> float:
        """The time at which to stop waiting for a chunk. Once an owner is lost, it is earlier: just late
        enough to ask all other members."""
        seconds = self._patience.stall_seconds
        if self._gather.commit and any(place in self._lost for place in self._gather.incomplete):
            seconds = min(seconds, self._patience.ask_seconds * (len(self._others) + 1))
        return self._progress_at + seconds

    @property
    def _gone(self) -> set[int]:
        """The lost members that cannot be reached. Members that were only silent still get messages."""
        return self._lost.keys() - self._silent

    @property
    def _overdue(self) -> list[int]:
        """Return the members that this one waits for, if more than half of their time is over."""
        now, patience = self._now, self._patience
        found = self._signs.overdue(self._lost, now)
        if self._is_scattering:
            is_late = now >= self._scatter_until - patience.scatter_seconds / 2
            found += [p for p in self._unsettled() if is_late and not self._scatter.has_begun(p)]
        elif not self._gather.commit and now >= self._phase_until - patience.commit_seconds / 2:
            found += [place for place in self._owners if place not in self._haves]
        elif self._gather.commit and now >= self._progress_at + patience.stall_seconds / 2:
            found += self._gather.incomplete
        return [place for place in found if place not in self._lost]

    def _unsettled(self) -> list[int]:
        return [place for place in self._scatter.unsettled() if place not in self._lost]

    def _commit_own(self) -> Sends:
        if self._scatter.is_committed:
            return []
        fact = self._statements.make(COMMITMENT_PURPOSE, self._scatter.commit())
        return self._to_all(Commitment(self.id, fact))

    def _take_commitment(self, place: int, fact: Fact) -> None:
        author = self._statements.author_of(COMMITMENT_PURPOSE, fact)
        body: CommitmentBody = decode(fact.body, CommitmentBody, bytes_max=FACT_BODY_BYTES_MAX)
        if author != place:
            raise RemoteProtocolError("a commitment whose author is a different member")
        self._scatter.check(author, body)
        if self._statements.is_new(COMMITMENT_PURPOSE, author, fact):
            self._scatter.take_commitment(author, body, fact.body)

    def _say_have(self) -> Sends:
        sends = self._commit_own()
        senders = [place for place in self._scatter.senders if place not in self._gone]
        self._unsent = tuple(place for place in senders if not self._scatter.holds(place))
        body = self._scatter.have()
        fact = self._statements.make(HAVE_PURPOSE, encode(body))
        self._haves[self._place] = body
        self._phase_until = max(self._scatter_until, self._now) + self._patience.commit_seconds
        self._ask_at = self._now + self._patience.ask_seconds
        told = self._arrivals.told().items()
        sends += [(self._peers[place], message) for place, message in told if place not in self._lost]
        return sends + self._to_all(Have(self.id, fact))

    # Commit

    def _take_have(self, fact: Fact) -> None:
        author = self._statements.author_of(HAVE_PURPOSE, fact)
        body: HaveBody = decode(fact.body, HaveBody, bytes_max=FACT_BODY_BYTES_MAX)
        places = [entry.place for entry in body.held]
        if author not in self._owners or body.attempt != self.id:
            raise RemoteProtocolError("a have-set of a member that reduces nothing, or of another attempt")
        if places != sorted(set(places)) or not set(places) <= set(self._scatter.senders):
            raise RemoteProtocolError("a have-set out of order, or of members without tensors")
        if not all(is_weight(entry.weight) for entry in body.held):
            raise RemoteProtocolError("a have-set with a wrong weight")
        if self._statements.is_new(HAVE_PURPOSE, author, fact):
            self._haves[author] = body
            self._ask_at = min(self._ask_at, self._now + self._patience.ask_seconds)

    def _advance(self) -> Sends:
        """Take every step that has become possible."""
        sends: Sends = []
        if self.result is None and (liars := self._contradicting()):
            return self._fail(Reason.CONTRADICTED, *liars)
        if self.result is None and self._is_scattering and not self._unsettled():
            sends += self._say_have()
        if self.result is None and not self._gather.commit and len(self._haves) == len(self._owners):
            sends += self._decide()
        is_whole = self._gather.commit and self._gather.is_whole
        if self.result is None and is_whole and not self._agreement.digest:
            sends += self._say_holding()
        if self.result is None and self._agreement.digest and not self._agreement.awaited(self._lost):
            sends += self._succeed()
        return sends

    def _decide(self) -> Sends:
        """Compute the set S and the commit, once all have-sets have arrived."""
        bodies = [self._haves[place] for place in self._owners]
        common = tuple(entry for entry in bodies[0].held if all(entry in body.held for body in bodies[1:]))
        if len(common) < 2:
            return self._fail(Reason.TOO_FEW, *self._scatter.spoilers(self._haves))
        weights = counted_weights(self.group.terms.aggregate, [entry.weight for entry in common])
        self._set = tuple(
            HeldPart(entry.place, weight, entry.commitment)
            for entry, weight in zip(common, weights, strict=True)
        )
        commit = blake3(self.id + b"".join(encode(body) for body in bodies)).digest()
        mine = self._owners.get(self._place)
        if mine is None:
            left = set(self._scatter.senders) - self._gone - {self._place, *(entry.place for entry in common)}
            self._unsent = tuple(sorted(place for place in left if not self._scatter.has_begun(place)))
        sources = [] if mine is None else self._scatter.sources(self._set)
        self._gather.begin(commit, mine, sources, reduction_of(self.group.terms.aggregate))
        self._phase_until = self._now + self._patience.gather_seconds
        self._progress_at = self._now
        for place, queue in self._queues.items():
            queue.clear()
            if mine is not None and self._gather.parts and place not in self._lost:
                queue.update(dict.fromkeys((True, self._place, n) for n in range(chunk_count(mine))))
        for part in self._gather.parts.values():
            part.check()
        return []

    # Reduce and gather

    def _seal(self) -> Sends:
        """Finish and sign this member's part, once."""
        if self._gather.parts[self._place].is_whole:
            return []
        body = self._gather.seal()
        if body is None:
            return self._fail(Reason.NOT_FINITE)
        fact = self._statements.make(SEAL_PURPOSE, body)
        return self._to_all(Seal(self.id, fact))

    def _take_chunk(self, place: int, message: Chunk) -> None:
        if message.phase == "scatter":
            if self._is_scattering:
                size = self._scatter.take_chunk(place, message)
                self._arrivals.note(self._now, place, size)
                self._moved(size)
            return
        if message.place not in self._gather.parts or message.place == self._place:
            raise RemoteProtocolError("a reduced chunk from a member that does not reduce that part")
        if place != message.place and not self._questions.has_asked(message.place, place):
            raise RemoteProtocolError("a reduced chunk that was not asked for")
        if self.result is None:
            self._moved(self._gather.take_chunk(message))
            self._gather.parts[message.place].check()

    def _take_seal(self, fact: Fact) -> None:
        author = self._statements.author_of(SEAL_PURPOSE, fact)
        body: SealBody = decode(fact.body, SealBody, bytes_max=FACT_BODY_BYTES_MAX)
        self._gather.check(body, author)
        if self._statements.is_new(SEAL_PURPOSE, author, fact):
            self._gather.take_seal(body, author)
            self._progress_at = self._now
            self._gather.parts[author].check()

    # Agree

    def _say_holding(self) -> Sends:
        """Declare this member's result, and send the facts behind it to members with a different one."""
        if not self._gather.parts and not np.isfinite(self._gather.vector).all():
            return self._fail(Reason.NOT_FINITE)
        digest = self._gather.digest()
        sends = self._to_all(Holding(self.id, digest))
        for place in self._agreement.declare(digest, self._now + self._patience.agree_seconds):
            sends += self._tell_facts(place)
        return sends

    def _contradicting(self) -> list[int]:
        """Return the owners that are proved to have equivocated, so that members may hold different bytes."""
        return [place for purpose, place in self._statements.equivocations if purpose != COMMITMENT_PURPOSE]

    def _succeed(self) -> Sends:
        total = sum(entry.weight for entry in self._set)
        shares = {self._peers[entry.place]: entry.weight / total for entry in self._set}
        self._gather.vector.flags.writeable = False
        self.result = Averaged(self._gather.vector, shares, self._agreement.digest)
        self._close_at = self._now + self._patience.linger_seconds
        return []

    # Missing chunks and facts

    def _ask(self) -> Sends:
        """Ask all for facts. Ask for each slow part's chunks: first its owner, then the others in turn."""
        self._ask_at = self._now + self._patience.ask_seconds
        alive = [place for place in self._others if place not in self._lost]
        if not self._gather.commit:
            return [(self._peers[place], ChunkRequest(self.id, self._place)) for place in alive]
        sends: Sends = self._seal() if self._place in self._gather.parts else []
        is_slow = self._now >= self._progress_at + self._patience.ask_seconds
        self._questions.begin()
        for place in self._gather.incomplete:
            candidates = [p for p in (place, *(p for p in alive if p != place)) if p in alive]
            if candidates and (is_slow or place in self._lost) and place != self._place:
                asked = self._questions.choose(place, candidates)
                missing = self._gather.parts[place].missing[:CHUNKS_ASKED_MAX]
                sends.append((self._peers[asked], ChunkRequest(self.id, place, missing)))
        return sends

    def _answer(self, place: int, message: ChunkRequest) -> Sends:
        """Send the facts that this member knows, and queue the chunks that it holds."""
        part = self._gather.parts.get(message.place)
        if part is not None and part.is_whole and self._gather.commit and place not in self._gone:
            for number in message.chunks:
                if number in part.checksums and self._questions.may_relay(place):
                    self._queues[place][True, message.place, number] = None
        return self._tell_facts(place) if self._questions.may_answer(place, self._now) else []

    def _tell_facts(self, place: int) -> Sends:
        """Send a member the have-sets and seals that this one knows."""
        if place in self._gone:
            return []
        kinds: dict[str, type[Have] | type[Seal]] = {HAVE_PURPOSE: Have, SEAL_PURPOSE: Seal}
        facts = [(kinds[said], fact) for said, fact in self._statements.of_others_than(place, kinds)]
        return [(self._peers[place], kind(self.id, fact)) for kind, fact in facts]

    # Common

    def _place_of(self, peer: PeerId) -> int:
        if peer not in self._peers or peer == self._signer.peer:
            raise RemoteProtocolError("a peer from outside the group")
        return self._peers.index(peer)

    def _moved(self, count: int) -> None:
        if count:
            self.received_bytes += count
            self._progress_at = self._now

    def _to_all(self, message: AttemptMessage) -> Sends:
        return [(self._peers[place], message) for place in self._others if place not in self._gone]

    def _fail(self, reason: Reason, *suspects: int) -> Sends:
        if self.result is not None:
            raise LocalProtocolError("an attempt has one result")
        places = dict.fromkeys((*suspects, *(place for place in self._lost if place in self._owners)))
        found = [place for place in places if place != self._place]
        self.result = NotAveraged(
            reason,
            tuple(self._peers[place] for place in found if place not in self._gone),
            tuple(self._peers[place] for place in found if place in self._gone),
        )
        if reason is Reason.INCOMPLETE:
            # Other members may still need this member's parts.
            self._close_at = self._now + self._patience.linger_seconds
            return []
        sends = self._to_all(Withdraw(self.id))
        self._close()
        return sends

    def _close(self) -> None:
        self.is_closed = True
        for queue in self._queues.values():
            queue.clear()
        self._scatter.close()
        self._gather.close()
