"""What plan should come next, as this member sees it: who is gone, who is missing, who could come.

`next_change` is pure. `Succession` asks whoever is to come, and tells the chain what to wish for. Only the
first living member of the committee asks, so that no two ask the same ones; every member wishes for what
needs nobody new.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import trio

from crypto.errors import RemoteProtocolError
from crypto.facts import Signer
from crypto.identity import PeerId, short_peer
from node.runs.chain import ChainShell
from node.runs.manifest import Run
from node.runs.placement import (
    PREPARE_SECONDS_MAX,
    Ask,
    Decliners,
    Offer,
    ask_all,
    lease_all,
    release,
    rounded,
    start,
)
from node.runs.pulse import PAUSE_SECONDS_MAX
from node.runs.requests import Prepare
from node.runs.service import Service
from partition.plan.change import JOININGS_MAX, Change, Joining, successor
from partition.plan.history import History
from partition.plan.plan import NOTHING, Plan, committee, encode_plan

BUSY_SECONDS = 30.0
"""A provider that declined is asked again after so long."""
UNMET_SECONDS = 30.0
"""A member that has not been heard of at all counts as living for so long."""
REFILL_SECONDS = 10.0
"""A stage short of a replica waits so long for the dust to settle before another is asked for."""
LOST_SECONDS_MAX = 120.0
"""A stage whose last replica is gone, and no checkpoint has it: so long it may come back, for it may only be
out of reach."""


@dataclass(frozen=True)
class Outlook:
    """What one member knows. `wanted` are the replicas each stage began with.

    `absent` are on the roster and dead, gone, failed, or without the memory of their stage; `leaving` will
    go and still help. `candidates` could take a stage, the best first. `restorable` is the newest checkpoint
    and its step, if there is one. Only who `asks` knows of candidates.
    """

    plan: Plan
    absent: frozenset[PeerId]
    leaving: frozenset[PeerId] = frozenset()
    candidates: tuple[tuple[PeerId, int], ...] = ()
    wanted: tuple[int, ...] = ()
    restorable: tuple[bytes, int] | None = None
    newcomers: tuple[PeerId, ...] = ()
    may_refill: bool = True
    asks: bool = True


@dataclass(frozen=True)
class Hopeless:
    """No plan can follow as things are, and why, in words for a person; `waits_seconds` is how long that may
    yet change. `lost` are those who would be needed."""

    reason: str
    waits_seconds: float = PAUSE_SECONDS_MAX
    lost: tuple[PeerId, ...] = ()


def next_change(view: Outlook) -> Change | Hopeless | None:
    """What should be decided next, None for nothing."""
    plan = view.plan
    lost = set(plan.roster) & view.absent
    candidates = [row for row in view.candidates if plan.stage_of(row[0]) is None or row[0] in lost]
    left = [[peer for peer in stage.replicas if peer not in lost] for stage in plan.stages]
    joined: list[Joining] = []
    empty = [number for number, peers in enumerate(left) if not peers]
    held = {number: tuple(PeerId(peer) for peer in plan.stages[number].replicas) for number in empty}
    if empty and view.restorable is None:
        where = f"stage {empty[0] + 1} of {len(left)}"
        reason = f"{where} lost its last replica, and no checkpoint holds its parameters"
        return Hopeless(reason, LOST_SECONDS_MAX, held[empty[0]])
    for number in empty:
        if not candidates:
            reason = f"stage {number + 1} of {len(left)} has no replica left"
            reason += ", and no member has room for it" if view.asks else ""
            return Hopeless(reason, lost=held[number])
        peer, rate = candidates.pop(0)
        joined.append(Joining(peer, number, rate))
    staying = [[peer for peer in peers if peer not in view.leaving] for peers in left]
    for number, peers in enumerate(staying):
        # Who goes is replaced before it goes where it is the last; else a free place is filled if there is
        # one.
        is_last = not peers and number not in empty
        is_short = bool(view.wanted) and len(peers) + (number in empty) < view.wanted[number]
        refills = is_short and view.may_refill and not lost and not joined
        if candidates and len(joined) < JOININGS_MAX and (is_last or refills):
            peer, rate = candidates.pop(0)
            joined.append(Joining(peer, number, rate))
    admitted = tuple(peer for peer in view.newcomers if peer not in plan.roster and not lost)
    if not lost and not joined and not admitted:
        return None
    if not set(plan.roster) - lost and not joined:
        return Hopeless("nobody of the run is left")
    restored, step = view.restorable if empty and view.restorable else (NOTHING, 0)
    return Change(
        lost=tuple(sorted(lost)), joined=tuple(joined), admitted=admitted, restored=restored, step=step
    )


def ranked(
    offers: Collection[Offer], *, first: Collection[bytes], roster: Collection[bytes], last: Collection[bytes]
) -> tuple[tuple[PeerId, int], ...]:
    """Order candidates: those who come `first`, members of the `roster`, then the fastest; those who come
    `last`, for they declined lately, after all others, so that a few who never come do not take turns."""
    order = sorted(
        offers,
        key=lambda offer: (
            offer.peer not in first,
            offer.peer in last,
            offer.peer not in roster,
            -rounded(offer.flops_per_second),
            offer.peer,
        ),
    )
    return tuple((offer.peer, rounded(offer.flops_per_second)) for offer in order)


@dataclass(eq=False)
class _Asking:
    """A change that needs somebody to come, the plan it makes, how that came about, and whether all have said
    that they are ready."""

    change: Change
    plan: Plan
    history: History
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    is_done: bool = False

    @property
    def rows(self) -> dict[PeerId, int]:
        """Who is to hold which stage."""
        return {PeerId(row.peer): row.stage for row in self.change.joined}

    @property
    def newcomers(self) -> list[PeerId]:
        """They, and whoever is let in without a stage."""
        return [*self.rows, *(PeerId(peer) for peer in self.change.admitted)]


@dataclass
class Succession:
    """Keeps one run's wish up to date. `changed` whenever anything it looks at may be different."""

    run: Run
    chain: ChainShell
    signer: Signer
    ask: Ask
    live: Callable[[], Collection[PeerId]]
    gone: Callable[[], Collection[PeerId]]
    offers: Callable[[], Sequence[Offer]]
    monotonic: Callable[[], float]
    hopeless: Callable[[Hopeless | None, bool], None]
    wanted: tuple[int, ...]
    restorable: Callable[[], tuple[bytes, int] | None]
    absent: dict[PeerId, str] = field(default_factory=dict)
    leaving: set[PeerId] = field(default_factory=set)
    _busy: dict[PeerId, float] = field(default_factory=dict)
    _decliners: Decliners = field(default_factory=Decliners)
    _again: trio.Event = field(default_factory=trio.Event)
    _settled_at: float = 0.0
    _hopeless_since: float | None = None
    _asking: _Asking | None = None

    def __post_init__(self) -> None:
        self.began = self.monotonic()

    def changed(self) -> None:
        """Think again."""
        self._again.set()

    def miss(self, peer: PeerId, reason: str) -> None:
        """This member lives, maybe, and the next plan must do without it."""
        self.absent.setdefault(peer, reason)
        self.changed()

    def why(self, lost: Collection[bytes]) -> str:
        """The reasons for which members were lost, for a person; as far as they are known here."""
        known = [(peer, self.absent[PeerId(peer)]) for peer in lost if PeerId(peer) in self.absent]
        return "; ".join(f"{short_peer(PeerId(peer))}: {reason}" for peer, reason in known)

    def decided(self) -> None:
        """A plan has come into force: who was absent under the last one may have come back."""
        roster = set(self.chain.head.roster)
        self.leaving &= roster
        self.absent.clear()
        self._settled_at = self.monotonic()
        self.changed()

    def living(self) -> set[PeerId]:
        """Who of those ever on the roster is to be reckoned with.

        That includes whom this node has not heard of yet: news of a newcomer takes some rounds of gossip.
        """
        alive, gone = self.live(), self.gone()
        is_new = self.monotonic() < self.began + UNMET_SECONDS
        known = {self.signer.peer, *self.chain.core.acquainted}
        return {peer for peer in known if peer in alive or (is_new and peer not in gone)}

    def has_majority(self) -> bool:
        """Whether the living of the committee could decide."""
        alive, voters = self.living(), committee(self.chain.head)
        return 2 * sum(peer in alive for peer in voters) > len(voters)

    def may_go(self, peer: PeerId) -> bool:
        """Whether nothing is lost if this member goes between two steps."""
        plan = self.chain.head
        stage = plan.stage_of(peer)
        return stage is None or any(
            other != peer and other not in self.leaving and other not in self.absent
            for other in plan.stages[stage].replicas
        )

    def is_proposer(self) -> bool:
        """Whether this member is the first of the committee that lives: it asks newcomers."""
        alive, voters = self.living(), committee(self.chain.head)
        # Whoever is to be lost cannot bring the plan without it to others; unless it is so for all.
        order = [*(peer for peer in voters if peer not in self.absent), *voters]
        return next((peer for peer in order if peer in alive), None) == self.signer.peer

    async def think(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                self._again = trio.Event()
                self.chain.wish(self._next(nursery), self.chain.core.head_hash)
                with trio.move_on_after(REFILL_SECONDS):
                    await self._again.wait()

    def _next(self, nursery: trio.Nursery) -> Change | None:
        """What to wish for now; who is to come is asked first."""
        view, asking = self.outlook(), self._asking
        if asking is not None and not self._still_fits(asking, view):
            self._asking = None
            asking.scope.cancel()
            if asking.plan != view.plan:
                nursery.start_soon(self._release, asking)
            asking = None
        if asking is not None:
            return asking.change if asking.is_done else None
        found = next_change(view)
        if isinstance(found, Hopeless):
            why = self.why(found.lost)
            self._mind(replace(found, reason=f"{found.reason} ({why})" if why else found.reason))
            return None
        self._mind(None)
        if found is not None and (found.joined or found.admitted):
            try:
                plan = successor(view.plan, found)
                asking = self._asking = _Asking(found, plan, self.chain.history(plan, found))
            except RemoteProtocolError:
                return None
            nursery.start_soon(self._ask_newcomers, asking)
            return None
        return found

    def _still_fits(self, asking: _Asking, view: Outlook) -> bool:
        """Whether it follows the newest plan, loses whom it should, and who is to come lives."""
        return (
            asking.plan.parent == self.chain.core.head_hash
            and set(asking.change.lost) == set(view.plan.roster) & view.absent
            and self._may_all_come(asking.newcomers)
        )

    def _may_all_come(self, newcomers: Collection[PeerId]) -> bool:
        live = self.live()
        return all(peer in live and peer not in self.leaving for peer in newcomers)

    async def _ask_newcomers(self, asking: _Asking) -> None:
        with asking.scope:
            rows, plan = asking.rows, asking.plan
            refused = await lease_all(self.run, plan, rows, self.signer, self.ask, asking.history)
            if refused is None:
                # While the stages open the run goes on under the plan it has.
                ready = Prepare(self.run.fact, encode_plan(plan), asking.history)
                failures = await ask_all(ready, asking.newcomers, self.ask, PREPARE_SECONDS_MAX)
                asking.is_done = not failures
                refused = next(iter(failures.items()), None)
            if refused is not None:
                self._busy[refused[0]] = self.monotonic() + BUSY_SECONDS
                self._decliners.note(refused[0], self.monotonic())
                self._asking = None
                await self._release(asking)
            self.changed()

    async def start(self, plan: Plan, peers: Sequence[PeerId]) -> dict[PeerId, str]:
        """Have newcomers start with a plan that is in force; who did not, and why."""
        try:
            history = self.chain.history(plan)
        except RemoteProtocolError as error:
            return dict.fromkeys(peers, str(error))
        return await start(self.run, plan, history, peers, self.ask)

    async def _release(self, asking: _Asking) -> None:
        await release(self.run, asking.plan, list(asking.rows), self.ask)

    async def give_up(self) -> None:
        """Nothing comes next any more: let whoever has been asked to come go again."""
        asking, self._asking = self._asking, None
        if asking is not None and asking.plan != self.chain.head:
            await self._release(asking)

    def _mind(self, found: Hopeless | None) -> None:
        """What looks hopeless may be so for a moment only: who is missing comes back, a provider comes."""
        now = self.monotonic()
        if found is None:
            self._hopeless_since = None
        elif self._hopeless_since is None:
            self._hopeless_since = now
        since = now if self._hopeless_since is None else self._hopeless_since
        if found is None or now - since >= REFILL_SECONDS:
            self.hopeless(found, found is not None and now - since >= found.waits_seconds)

    def outlook(self) -> Outlook:
        """What is known now."""
        plan, now = self.chain.head, self.monotonic()
        alive = self.living()
        absent = frozenset(
            PeerId(peer) for peer in plan.roster if peer not in alive or PeerId(peer) in self.absent
        )
        asks = self.is_proposer() and self.chain.can_tell
        requester = self.run.requester
        return Outlook(
            plan=plan,
            absent=absent,
            leaving=frozenset(self.leaving - absent),
            candidates=self._candidates(plan, now) if asks else (),
            wanted=self.wanted,
            restorable=self.restorable(),
            newcomers=(requester,) if asks and self._may_come(requester, now) else (),
            may_refill=asks and now >= self._settled_at + REFILL_SECONDS,
            asks=asks,
        )

    def _candidates(self, plan: Plan, now: float) -> tuple[tuple[PeerId, int], ...]:
        roster = set(plan.roster)
        free = [offer for offer in self.offers() if offer.has_slot and self._may_come(offer.peer, now)]
        # Who asks must be in the plan that it brings to others, also where it has lost its memory itself.
        first = {self.signer.peer} & set(self.absent)
        return ranked(free, first=first, roster=roster, last=self._decliners.now(now))

    def _may_come(self, peer: PeerId, now: float) -> bool:
        return peer in self.live() and peer not in self.leaving and self._busy.get(peer, now) <= now


def make_succession(
    service: Service,
    run: Run,
    chain: ChainShell,
    *,
    hopeless: Callable[[Hopeless | None, bool], None],
    wanted: tuple[int, ...],
    restorable: Callable[[], tuple[bytes, int] | None],
) -> Succession:
    """A run's succession on the node that this service is of."""
    return Succession(
        run=run,
        chain=chain,
        signer=service.signer,
        ask=service.ask,
        live=service.live,
        gone=service.gone,
        offers=service.offers,
        monotonic=service.seams.clock.monotonic,
        hopeless=hopeless,
        wanted=wanted,
        restorable=restorable,
    )
