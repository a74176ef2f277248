"""One participant's part in an averaging run: its rounds, its reports, and the state it offers to others.

It belongs to the node's event loop. `node.library` and `node.optimizer` use it from other threads.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import trio

from crypto.identity import PeerId
from gossip.averaging.arrivals import UploadRate
from gossip.averaging.attempt import Attempt
from gossip.averaging.codecs import codec_of, rounding_of
from gossip.averaging.group import Aggregate, Group
from gossip.averaging.outcome import Averaged, NotAveraged, Reason
from gossip.averaging.pace import AttemptPace
from gossip.averaging.robust.reduction import Vector
from gossip.roster import Roster
from node.averaging.context import ParticipationService
from node.averaging.expectations import Expectations
from node.averaging.group_search import GroupSearch
from node.averaging.rounds import Gate, RosterView, Round, RoundWish
from node.averaging.runner import Runner
from node.averaging.state_exchange import StateExchange
from node.averaging_events import AveragingEnded, AveragingJoined, AveragingLeft, AveragingStepped

ATTEMPTS_MAX = 3
"""Maximum number of attempts in one round. A member that dies during the reduction costs one attempt, and the
others retry."""
PACE_FLOOR_SECONDS = 5.0
"""Minimum time allowed for an attempt, however fast earlier ones were, because another process may be
busy."""
FOR_WANT_OF_TIME = (Reason.NO_HAVE_SETS, Reason.INCOMPLETE, Reason.TOO_FEW)

T = TypeVar("T")


class Participation:
    """This peer's part in one run.

    Created by `Averaging.open`.
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
        """The aggregation rule of all its rounds."""
        self.alike = alike or {}
        """The signatures of the same tensors under other rules, each with the rule's name."""
        self.name = name
        self.key = key
        self.roster = roster
        self._service = service
        self._stirred = trio.Event()
        self.expectations = service.seams.part(Expectations)(self.peer, roster, service.seams.clock)
        """Decides which peers to wait for and which to leave out, from this node's experience."""
        self.states = StateExchange(name, key, roster, service, self.expectations)
        """The states that this peer offers and takes over."""
        self.upload = UploadRate()
        """This peer's upload rate as measured by others."""
        self._search = GroupSearch(
            key,
            roster,
            service,
            self.expectations,
            self.upload,
            gate=gate,
            aggregate=aggregate,
            changed=self._changed,
            ended=lambda: self.ended,
        )
        self.walk = self._search.walk
        """This peer's walk over the grid of groups."""
        self.matched = self._search.matched
        """Handles an event of this node's matchmaking, which may be about a different run."""
        self._pace = AttemptPace(floor_seconds=PACE_FLOOR_SECONDS)
        self._undeclared: tuple[PeerId, ...] = ()
        self._last_attempt: weakref.ref[Attempt] | None = None
        self.stepped_at = service.seams.clock.monotonic()
        """The time of the latest step made here; before the first, the time at which this peer started."""
        self._status = ""
        self.counters: Counter[str] = Counter()
        self.ended = ""
        """Why this peer was excluded; empty if it was not."""
        self._is_closed = False
        self._entered: set[PeerId] = set()
        """The peers that were reported as taking part."""

    @property
    def peer(self) -> PeerId:
        """This peer."""
        return self._service.seams.network.peer

    @property
    def status(self) -> str:
        """The reason why the present round waits, in one line; empty if there is no round."""
        return self._search.status or self._status

    @property
    def look_seconds(self) -> float | None:
        """How long, from its beginning, a round may search for a group; None if it is not searching."""
        return self._search.look_seconds

    async def compute(self, function: Callable[[], T]) -> T:
        """Run a function in the executor."""
        return await self._service.seams.executor.run(function)

    # View and reports

    def tell(self, **said: Any) -> None:
        """Report this peer's progress, and the settings of its latest step: see `Roster.tell`."""
        if not self.ended:
            self.states.moved(said["step"])
            self._service.tell(lambda now: self.roster.tell(now, **said))

    @property
    def view(self) -> RosterView:
        """This node's present view of the run."""
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
        """Handle a peer that takes part, or claims to."""
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
        """Handle a peer that no longer takes part."""
        if peer not in self._entered:
            return  # it only claimed to take part
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
        """Expel a peer that may no longer take part."""
        self._service.tell(lambda _: self.roster.expel(peer, reason))

    def end(self, reason: str) -> None:
        """Expel this peer itself: each further round fails with the reason, and training continues alone."""
        self.ended = reason
        self.close()
        self._stir()

    def _stir(self) -> None:
        stirred, self._stirred = self._stirred, trio.Event()
        stirred.set()

    async def _changed(self) -> None:
        """Wait until the participants change."""
        await self._stirred.wait()

    async def wait_for_peers(self, count: int) -> None:
        """Wait until `count` others take part, or this peer no longer may."""
        while not self.ended and len(self.roster.reports) < count:
            await self._changed()

    def stepped(self, step: int, samples: int) -> None:
        """Report a global step that was made here, from `samples` samples of all peers."""
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
        """Wait briefly for participants; other members answer a greeting within a round trip."""
        with trio.move_on_after(seconds):
            await self.wait_for_peers(1)
            await trio.sleep(min(seconds / 4, 0.25))  # lets peers named by the first participant answer too

    def close(self) -> None:
        """Leave the run."""
        if self._is_closed:
            return
        self._is_closed, self.ended = True, self.ended or "this peer takes no further part"
        self._search.close()
        self._service.close()

    # Rounds

    async def average(self, vector: Vector | None, weight: float, wanted: RoundWish) -> Round:
        """Find a group and average with it; if that fails, try again with the remaining peers. The vector
        must not change before this returns."""
        clock = self._service.seams.clock
        begun = clock.monotonic()
        members = sent = received = 0
        error = ""
        self._search.begin(begun)
        self.expectations.begin()
        for number in range(ATTEMPTS_MAX):
            if self.ended:
                error = self.ended
                break
            found = await self._search.find(vector, wanted, number)
            if isinstance(found, str):
                error = error or found
                break
            group, spot = found
            members = len(group.members)
            attempt, result = await self._attempt(group, vector, weight, wanted)
            sent, received = sent + attempt.sent_bytes, received + attempt.received_bytes
            if isinstance(result, Averaged):
                if wanted.round is None:
                    self.walk.averaged(group, spot)
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
                    attempt=group.id,
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
        self._status = f"the exchange with {len(group.members) - 1} peers"
        size = group.terms.items * (8 if group.terms.dtype == "float64" else 4)
        begun = seams.clock.monotonic()
        patience = wanted.patience or self._pace.patience(size)
        # Late messages, which arrived while the previous attempt was still open, count too.
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
        self._status, made = "", replace(made, waited_seconds=self._search.looked_seconds)
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
