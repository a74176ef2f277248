"""One participant's part in a run of averaging: its rounds, its reports, and the state it hands on.

It belongs to the node's event loop. `node.library` and `node.optimizer` use it from other threads.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import trio
from blake3 import blake3

from crypto.identity import PeerId, short_peer
from gossip.averaging.arrivals import UploadRate
from gossip.averaging.attempt import Attempt
from gossip.averaging.codecs import codec_of, rounding_of
from gossip.averaging.grid import GROUP_SIZE_MIN
from gossip.averaging.group import GROUP_MEMBERS_MAX, NONCE_BYTES, Aggregate, Group, GroupMember, Terms
from gossip.averaging.outcome import Averaged, NotAveraged, Reason
from gossip.averaging.pace import AttemptPace
from gossip.averaging.robust.reduction import Vector
from gossip.averaging.walk import GridWalk, Spot
from gossip.matchmaking import CameLate, Formed, GroupWish, NotFormed
from gossip.roster import Roster
from node.averaging.context import ParticipationService
from node.averaging.expectations import Expectations, expected_in
from node.averaging.rounds import Gate, RosterView, Round, RoundWish
from node.averaging.runner import Runner
from node.averaging.state_exchange import StateExchange
from node.averaging_events import AveragingEnded, AveragingJoined, AveragingLeft, AveragingStepped

ATTEMPTS_MAX = 3
"""The most attempts in one round: a member that dies while reducing costs one, and the others retry."""
PACE_FLOOR_SECONDS = 5.0
"""No attempt is given less time, however fast earlier ones were: another process may be busy."""
AGAIN_SECONDS = 4.0
"""How long another attempt of a round waits for any peer, beyond its window."""
DECLARED_SECONDS = 3.0
"""Added to a window where members find each other in the DHT: to store a record, and to find others'."""
NAMED_MAX = 3
"""The most peers that a status names: it is one line."""
NEWCOMERS_SECONDS = 1.0
"""The interval between two looks for peers that were unknown, or not admitted, when a wish was made."""
UNAWAITED_SECONDS = 0.25
"""How long a group waits where it expects nobody, though others are listed: one that is ready enters."""
SPOT_SECONDS = 1.0
"""How long a peer waits in its cell of the grid for any other, beyond its window."""
FOR_WANT_OF_TIME = (Reason.NO_HAVE_SETS, Reason.INCOMPLETE, Reason.TOO_FEW)

T = TypeVar("T")
Dtype = Literal["float32", "float64"]


class Participation:
    """This peer's part in one run. `Averaging.open` makes it.

    Long because a round, its group and what is said of both move with one step of the roster.
    """

    def __init__(
        self,
        name: str,
        key: bytes,
        roster: Roster,
        service: ParticipationService,
        gate: Gate | None = None,
        aggregate: Aggregate = "mean",
        alike: Mapping[bytes, str] | None = None,
    ) -> None:
        self._gate = gate
        self.aggregate = aggregate
        """The rule of all its rounds."""
        self.alike = alike or {}
        """The signatures of the same tensors under other rules, with the names of those."""
        self.name = name
        self.key = key
        self.roster = roster
        self._service = service
        self._formed: dict[bytes, trio.Event] = {}
        self._outcomes: dict[bytes, Formed | NotFormed] = {}
        self._stirred = trio.Event()
        self._items = 1
        self._dtype: Dtype = "float32"
        self.expectations = service.seams.part(Expectations)(self.peer, roster, service.seams.clock)
        """The peers that are awaited and left out, by this node's experience."""
        self.states = StateExchange(name, key, roster, service, self.expectations)
        """The states that this peer hands on and takes."""
        self.upload = UploadRate()
        """This peer's upload rate as others measured it."""
        self.walk = GridWalk(key, service.seams.network.peer)
        self._looked_seconds = self._begun_at = 0.0
        self._pace = AttemptPace(floor_seconds=PACE_FLOOR_SECONDS)
        self._undeclared: tuple[PeerId, ...] = ()
        self._last_attempt: weakref.ref[Attempt] | None = None
        self.stepped_at = service.seams.clock.monotonic()
        """The time of the last step made here; at first, of this peer's start."""
        self.status = ""
        self.look_seconds: float | None = None
        """How long from its beginning a round may look for a group; None where it does not."""
        self.counters: Counter[str] = Counter()
        self.ended = ""
        """Why this peer takes part no more against its will."""
        self._is_closed = False
        self._entered: set[PeerId] = set()
        """The peers that were reported to take part."""

    @property
    def peer(self) -> PeerId:
        """This peer."""
        return self._service.seams.network.peer

    async def compute(self, function: Callable[[], T]) -> T:
        """Run a function where computing is allowed."""
        return await self._service.seams.executor.run(function)

    # What others see

    def tell(self, **said: Any) -> None:
        """Report this peer's progress, and the settings of its last step: see `Roster.tell`."""
        if not self.ended:
            self.states.moved(said["step"])
            self._service.tell(lambda now: self.roster.tell(now, **said))

    @property
    def view(self) -> RosterView:
        """Return this node's present view of the run."""
        if self.ended:
            return RosterView()
        known = self.roster.reports
        reports = list(known.values())
        return RosterView(
            peers=len(reports),
            strangers=self.roster.strangers,
            other_rules=Counter(
                self.alike[each] for each in self.roster.stranger_signatures if each in self.alike
            ),
            stranger_signatures=self.roster.stranger_signatures,
            reports=reports,
            awaited={peer: known[peer] for peer in known.keys() - self.expectations.unawaited},
            voices=[known[peer] for peer in known.keys() - self.expectations.absent],
        )

    def entered(self, peer: PeerId) -> None:
        """Note that a peer takes part, or claims to."""
        if self._gate is not None and not self._gate.admits(peer):
            self._gate.seen(peer)
            return
        at = self._service.seams.clock.wall()
        if peer in self.roster.reports and peer not in self._entered:
            self._entered.add(peer)
            self._service.publish(
                AveragingJoined(at=at, run=self.name, peer=peer, peers=len(self.roster.reports))
            )
        self._stir()

    def left(self, peer: PeerId, reason: str) -> None:
        """Note that a peer takes part no more."""
        if peer not in self._entered:
            return  # it only claimed to
        self._entered.remove(peer)
        at = self._service.seams.clock.wall()
        peers = len(self.roster.reports)
        self._service.publish(AveragingLeft(at=at, run=self.name, peer=peer, reason=reason, peers=peers))
        self._stir()

    def admits(self, peer: PeerId) -> bool:
        """Return whether a peer may take part."""
        return self._gate is None or self._gate.admits(peer)

    def admitted(self, peer: PeerId) -> None:
        """Admit a peer that has shown its right to take part."""
        self._service.tell(lambda now: self.roster.admitted(now, peer))
        self.entered(peer)

    def expelled(self, peer: PeerId, reason: str) -> None:
        """Expel a peer that may take part no more."""
        self._service.tell(lambda _: self.roster.expel(peer, reason))

    def end(self, reason: str) -> None:
        """Expel this peer itself: each further round says so, and training goes on alone."""
        self.ended = reason
        self.close()
        self._stir()

    def _stir(self) -> None:
        stirred, self._stirred = self._stirred, trio.Event()
        stirred.set()

    async def wait_for_peers(self, count: int) -> None:
        """Wait until `count` others take part, or this peer no longer may."""
        while not self.ended and len(self.roster.reports) < count:
            await self._stirred.wait()

    def stepped(self, step: int, samples: int) -> None:
        """Report a global step that was made here, from `samples` of all peers."""
        clock = self._service.seams.clock
        now = clock.monotonic()
        seconds, self.stepped_at = now - self.stepped_at, now
        peers = len(self.roster.reports)
        self._service.publish(
            AveragingStepped(
                at=clock.wall(), run=self.name, step=step, samples=samples, peers=peers, seconds=seconds
            )
        )

    async def settle(self, seconds: float) -> None:
        """Wait briefly for participants: other members answer a greeting within a round trip."""
        with trio.move_on_after(seconds):
            await self.wait_for_peers(1)
            await trio.sleep(min(seconds / 4, 0.25))  # the first has named the others

    def close(self) -> None:
        """Take no further part."""
        if self._is_closed:
            return
        self._is_closed, self.ended = True, self.ended or "this peer takes no further part"
        for formed in self._formed.values():
            formed.set()
        self._service.close()

    # Rounds

    async def average(self, vector: Vector | None, weight: float, wanted: RoundWish) -> Round:
        """Find a group and average with it; where that fails, try again with the remaining peers. The vector
        must not change before this returns."""
        clock = self._service.seams.clock
        begun = self._begun_at = clock.monotonic()
        members = sent = received = 0
        error, self._looked_seconds = "", 0.0
        self.expectations.begin()
        for number in range(ATTEMPTS_MAX):
            if self.ended:
                error = self.ended
                break
            spot = None
            if wanted.round is None:
                count = 0 if self.roster.is_whole else self.roster.count
                spot = self.walk.spot(expected_in(self.roster, None), wanted.size_max, count)
            found = await self._find_group(vector, wanted, number, spot)
            if isinstance(found, str) and spot is not None and not self.ended:
                spot = None  # join the next group that forms
                found = await self._find_group(vector, wanted, number, None)
            if isinstance(found, str):
                error = error or found
                break
            members = len(found.members)
            attempt, result = await self._attempt(found, vector, weight, wanted)
            sent, received = sent + attempt.sent_bytes, received + attempt.received_bytes
            if isinstance(result, Averaged):
                if wanted.round is None:
                    self.walk.averaged(found, spot)
                seconds = clock.monotonic() - begun
                shares, error_of = dict(result.shares), await self._rounding(vector, wanted)
                made = Round(
                    result.vector,
                    shares,
                    members,
                    seconds,
                    sent,
                    received,
                    result.digest,
                    rounding=error_of,
                    attempt=found.id,
                    aggregate=self.aggregate,
                )
                return self._told(made)
            error = str(result)
            if result.reason in (Reason.CANCELLED, Reason.NOT_FINITE):
                break
        if wanted.round is None:
            self.walk.failed()
        return self._told(Round(None, {}, members, clock.monotonic() - begun, sent, received, b"", error))

    async def _attempt(
        self, group: Group, vector: Vector | None, weight: float, wanted: RoundWish
    ) -> tuple[Attempt, Averaged | NotAveraged]:
        """Make one attempt of a group; return it with its outcome."""
        seams = self._service.seams
        self.status = f"the exchange with {len(group.members) - 1} peers"
        size = group.terms.items * (8 if group.terms.dtype == "float64" else 4)
        begun = seams.clock.monotonic()
        patience = wanted.patience or self._pace.patience(size)
        # What was said late, while the last attempt lingered, counts too.
        last = None if self._last_attempt is None else self._last_attempt()
        silent = self._undeclared if last is None else last.undeclared
        make = partial(
            seams.part(Attempt),
            self._service.signer,
            group,
            vector,
            weight,
            begun,
            patience,
            codecs=wanted.codecs,
            silent=silent,
        )
        attempt = await seams.executor.run(make)
        runner = seams.part(Runner)(attempt, seams.network, seams.clock, seams.executor, self._service.refuse)
        self._service.start(runner)
        try:
            result = await runner.result()
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                await runner.cancel()
            self.expectations.gave_up(attempt, seams.clock.monotonic() - begun)
            raise
        self.upload.measured(attempt.upload_rate)
        seconds = seams.clock.monotonic() - begun
        needs_time = self.expectations.attempted(attempt, result, seconds)
        if isinstance(result, Averaged):
            self._undeclared, self._last_attempt = attempt.undeclared, weakref.ref(attempt)
            self._service.averaged(attempt, result)
            if needs_time:
                self._pace.succeeded(size, seconds)
        elif result.reason in FOR_WANT_OF_TIME and needs_time:
            self._pace.failed()
        return attempt, result

    async def _rounding(self, vector: Vector | None, wanted: RoundWish) -> float:
        """Return the relative error that the codec added to this peer's data."""
        if vector is None:
            return 0.0
        codec = codec_of(wanted.codec, str(vector.dtype), wanted.codecs)
        return 0.0 if codec.is_exact else await self.compute(partial(rounding_of, codec, vector))

    def _told(self, made: Round) -> Round:
        """Report a round on screens, and count it."""
        self.status, made = "", replace(made, waited_seconds=self._looked_seconds)
        self.counters["rounds" if made.is_averaged else "rounds_failed"] += 1
        self._service.publish(
            AveragingEnded(
                at=self._service.seams.clock.wall(),
                run=self.name,
                outcome="ok" if made.is_averaged else "failed",
                reason=made.error,
                step=self.roster.own_step,
                members=made.members,
                averaged=tuple(made.shares),
                seconds=made.seconds,
                sent_bytes=made.sent_bytes,
                received_bytes=made.received_bytes,
                rounding=made.rounding,
                aggregate=self.aggregate,
                liars_max=made.liars_max,
            )
        )
        return made

    async def _find_group(
        self, vector: Vector | None, wanted: RoundWish, attempt: int, spot: Spot | None
    ) -> Group | str:
        """Return the group that forms for an attempt of a round, at a spot of the grid if one is given, or
        why none forms. Members of a failed group are still expected, except those known to be gone: most only
        waited for another member."""
        service = self._service
        items, dtype = self._shape(vector)
        rate = self.upload.claimed if wanted.rate is None else wanted.rate
        nonce, coordinate = service.seams.entropy(NONCE_BYTES), 0 if spot is None else spot.coordinate
        me = GroupMember(self.peer, nonce, rate, vector is not None, coordinate)
        number = -1 if wanted.round is None else wanted.round
        round_number = self.walk.turn if wanted.round is None else wanted.round
        name = self.key + self.roster.signature + number.to_bytes(8, "big", signed=True)
        if wanted.round is not None and attempt:  # late ones cannot enter the group of the first
            name += attempt.to_bytes(1, "big")
        key = blake3(name + (b"" if spot is None else spot.key)).digest()

        terms = Terms(wanted.mode, wanted.codec, self.roster.signature, items, dtype, self.aggregate)

        def make(members: tuple[GroupMember, ...]) -> Group:
            return Group(self.key, round_number, attempt, terms, members)

        fits_all = len(self.walk.axes) < 2
        # In a grid it is not known who stands in which cell, only how many do.
        near = self._awaited(wanted.round) if wanted.round is not None or fits_all else ()
        expected = self.expectations.of(near)
        window, patience = wanted.window_seconds, wanted.patience_seconds
        size_hoped = 0 if spot is None else spot.size
        are_others_busy = wanted.round is not None and self.roster.own.has_state and self.roster.reports
        if not expected and (near or are_others_busy):
            # Whoever is ready all the same enters, and those right behind it.
            window, size_hoped = min(window, UNAWAITED_SECONDS), GROUP_MEMBERS_MAX
            patience = patience if wanted.round is None else 2 * window
        if attempt:  # members that succeeded in the last one come to no other
            patience = min(patience, window + AGAIN_SECONDS)
        if spot is not None:  # whoever is alone in its cell goes where others are
            patience = min(patience, window + SPOT_SECONDS)
        is_declared = spot is not None and not self.roster.is_whole
        if is_declared:  # a look in the DHT takes a moment
            patience += DECLARED_SECONDS
        now = service.seams.clock.monotonic()
        wish = GroupWish(
            me,
            key,
            expected,
            make,
            now,
            window_seconds=window + (DECLARED_SECONDS if is_declared else 0.0),
            patience_seconds=patience,
            size_min=min(wanted.size_min, wanted.size_max if fits_all else GROUP_SIZE_MIN),
            size_max=wanted.size_max,
            is_exclusive=wanted.round is not None,
            others=() if is_declared else tuple(self.roster.reports),
            size_hoped=size_hoped,
            admits=None if self._gate is None else self._gate.admits,
            waits=self.expectations.waits(now, expected, wanted),
            leaves_out=self.expectations.leaves_out,
            declines=self.expectations.declines,
            rank=None if is_declared else self.expectations.rank,
        )
        formed = self._formed[key] = trio.Event()
        self._outcomes.pop(key, None)
        self.status = f"a group of {len(self.roster.reports) + 1} peers"
        self.look_seconds = now - self._begun_at + patience
        try:
            service.match(lambda now: service.matches.begin(now, wish))
            async with trio.open_nursery() as nursery:
                if is_declared:
                    nursery.start_soon(service.declare, key, patience)
                else:
                    is_numbered = wanted.round is not None
                    nursery.start_soon(self._tell_newcomers, wish, wanted.round, is_numbered or fits_all)
                await formed.wait()
                nursery.cancel_scope.cancel()
        finally:
            self.look_seconds = None
            self._looked_seconds += service.seams.clock.monotonic() - now
            if self._formed.get(key) is formed:
                del self._formed[key]
            outcome = self._outcomes.pop(key, None)
            for each in self.expectations.ended(wish, is_kept=outcome is not None):
                service.match(lambda _, each=each: service.matches.end(each))  # type: ignore[misc]  # bound now
        if isinstance(outcome, Formed):
            return outcome.group
        return self.ended if outcome is None else outcome.reason

    async def _tell_newcomers(self, wish: GroupWish, round: int | None, are_expected: bool) -> None:  # noqa: A002 - the field's word
        """Send a wish to peers that become known after it was made, which it would not reach otherwise, and
        announce which peers it waits for. Runs until cancelled."""
        matches, told, key = self._service.matches, set(self.roster.reports), wish.key
        while True:
            if missing := wish.awaited:
                names = ", ".join(short_peer(peer) for peer in missing[:NAMED_MAX])
                more = f" and {len(missing) - NAMED_MAX} more" if len(missing) > NAMED_MAX else ""
                self.status = f"peers that are not ready yet: {names}{more}"
            with trio.move_on_after(NEWCOMERS_SECONDS):
                await self._stirred.wait()
            new = [peer for peer in self.roster.reports if peer not in told]
            if not new:
                continue
            told.update(new)
            expected = set(self.expectations.of(self._awaited(round))) if are_expected else set()
            awaited = [peer for peer in new if peer in expected]
            others = [peer for peer in new if peer not in expected]
            self._service.match(lambda now, awaited=awaited: matches.expect(now, key, awaited))  # type: ignore[misc]  # bound now
            self._service.match(lambda _, others=others: matches.introduce(key, others))  # type: ignore[misc]  # bound now

    def _shape(self, vector: Vector | None) -> tuple[int, Dtype]:
        if vector is None:
            return self._items, self._dtype
        self._items, self._dtype = vector.size, ("float64" if vector.dtype.itemsize == 8 else "float32")
        return self._items, self._dtype

    def _awaited(self, round: int | None) -> Sequence[PeerId]:  # noqa: A002 - the field's word
        """Return the expected peers; without a number also joining ones, which may be ready."""
        return tuple(self.roster.reports) if round is None else expected_in(self.roster, round)

    def matched(self, event: object) -> None:
        """Handle news of this node's matchmaking, for this run or another."""
        if isinstance(event, Formed | NotFormed) and event.key in self._formed:
            self._outcomes[event.key] = event
            self._formed[event.key].set()
        elif isinstance(event, CameLate):
            self.expectations.came_late(event)
