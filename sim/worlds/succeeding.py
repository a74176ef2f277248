"""What plan should come next, as one member of a run in a world of cores sees it.

What `node.runs.succession.Succession` is in a node, around the same pure `next_change`; without leases, for
here a peer that is free is free.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.runs.placement import PREPARE_SECONDS_MAX
from node.runs.succession import BUSY_SECONDS, REFILL_SECONDS, UNMET_SECONDS, Hopeless, Outlook, next_change
from partition.plan.agreement import Agreement
from partition.plan.change import Change, successor
from partition.plan.plan import Plan, committee, plan_hash
from sim.worlds.keeping import Ask
from sim.worlds.said import DONE, Prepare, Release
from sim.worlds.setting import Setting

RATE = 1_000
"""Of a peer that is not slowed; the cores count in FLOP/s, and only compare."""


@dataclass(eq=False)
class _Asking:
    """A change that needs somebody to come, and the plan it makes."""

    change: Change
    plan: Plan
    left: int
    is_done: bool = False
    refused: PeerId | None = None

    @property
    def newcomers(self) -> list[PeerId]:
        rows = [PeerId(row.peer) for row in self.change.joined]
        return [*rows, *(PeerId(peer) for peer in self.change.admitted)]


class Succeeding:
    """Keeps one member's wish up to date. `changed` is called whenever it should think again."""

    def __init__(
        self,
        setting: Setting,
        me: PeerId,
        chain: Agreement,
        *,
        wanted: tuple[int, ...],
        restorable: Callable[[], tuple[bytes, int] | None],
        hosts: Callable[[PeerId], bool],
        ask: Ask,
        changed: Callable[[], None],
        hopeless: Callable[[Hopeless | None, bool], None],
    ) -> None:
        self.wanted = wanted
        self.absent: dict[PeerId, str] = {}
        self._setting = setting
        self._me = me
        self._chain = chain
        self._restorable = restorable
        self._hosts = hosts
        self._ask = ask
        self._changed = changed
        self._hopeless = hopeless
        self._began = self._settled_at = setting.ground.now
        self._busy: dict[PeerId, float] = {}
        self._hopeless_since: float | None = None
        self._asking: _Asking | None = None

    def miss(self, peer: PeerId, reason: str) -> None:
        """It lives, maybe, and the next plan must do without it."""
        self.absent.setdefault(peer, reason)
        self._changed()

    def why(self, lost: Collection[bytes]) -> str:
        """The reasons for which members were lost."""
        return "; ".join(self.absent[PeerId(peer)] for peer in lost if PeerId(peer) in self.absent)

    def decided(self) -> None:
        """A plan has come into force: who was absent under the last one may have come back."""
        self.absent.clear()
        self._settled_at = self._setting.ground.now
        self._changed()

    def living(self) -> set[PeerId]:
        """Who of those ever on the roster is to be reckoned with, also whom nobody has told of yet."""
        told = self._setting.alive(self._me)
        is_new = self._setting.ground.now < self._began + UNMET_SECONDS
        return {peer for peer in (self._me, *self._chain.acquainted) if told.get(peer, is_new)}

    def has_majority(self) -> bool:
        """Whether the living of the committee could decide."""
        alive, voters = self.living(), committee(self._chain.head)
        return 2 * sum(peer in alive for peer in voters) > len(voters)

    def is_proposer(self) -> bool:
        """Whether this member is the first of the committee that lives: it asks newcomers."""
        alive, voters = self.living(), committee(self._chain.head)
        order = [*(peer for peer in voters if peer not in self.absent), *voters]
        return next((peer for peer in order if peer in alive), None) == self._me

    def wish(self) -> Change | None:
        """What this member would have decided now; who is to come is asked first."""
        view, asking = self._outlook(), self._asking
        if asking is not None and not self._still_fits(asking, view):
            self._asking = None
            if asking.plan != view.plan:
                self._release(asking)
            asking = None
        if asking is not None:
            return asking.change if asking.is_done else None
        found = next_change(view)
        self._mind(found if isinstance(found, Hopeless) else None)
        if isinstance(found, Hopeless):
            return None
        if found is not None and (found.joined or found.admitted):
            try:
                plan = successor(view.plan, found)
            except RemoteProtocolError:
                return None
            self._prepare(_Asking(found, plan, 0))
            return None
        return found

    def _outlook(self) -> Outlook:
        plan, now = self._chain.head, self._setting.ground.now
        alive = self.living()
        absent = frozenset(
            PeerId(peer) for peer in plan.roster if peer not in alive or PeerId(peer) in self.absent
        )
        asks = self.is_proposer()
        requester = self._setting.requester
        return Outlook(
            plan=plan,
            absent=absent,
            candidates=self._candidates(plan, now) if asks else (),
            wanted=self.wanted,
            restorable=self._restorable(),
            newcomers=(requester,) if asks and self._may_come(requester, now) else (),
            may_refill=asks and now >= self._settled_at + REFILL_SECONDS,
            asks=asks,
        )

    def _candidates(self, plan: Plan, now: float) -> tuple[tuple[PeerId, int], ...]:
        setting = self._setting
        free = [peer for peer in setting.pool if self._may_come(peer, now) and not self._hosts(peer)]
        # Who asks must be in the plan that it brings to others, also where it has lost its memory itself.
        first = {self._me} & set(self.absent)
        free.sort(key=lambda peer: (peer not in first, peer not in plan.roster, setting.slowness(peer), peer))
        return tuple((peer, max(1, round(RATE / setting.slowness(peer)))) for peer in free)

    def _may_come(self, peer: PeerId, now: float) -> bool:
        lives = peer == self._me or self._setting.alive(self._me).get(peer, False)
        return lives and self._busy.get(peer, now) <= now

    def _still_fits(self, asking: _Asking, view: Outlook) -> bool:
        return (
            asking.plan.parent == self._chain.head_hash
            and set(asking.change.lost) == set(view.plan.roster) & view.absent
            and all(
                peer == self._me or self._setting.alive(self._me).get(peer, False)
                for peer in asking.newcomers
            )
        )

    def _prepare(self, asking: _Asking) -> None:
        self._asking = asking
        asking.left = len(asking.newcomers)

        def answered(peer: PeerId, reply: Any) -> None:
            asking.left -= 1
            if reply is not DONE:
                asking.refused = asking.refused or peer
            if asking.left or self._asking is not asking:
                return
            if asking.refused is not None:
                self._busy[asking.refused] = self._setting.ground.now + BUSY_SECONDS
                self._asking = None
                self._release(asking)
            asking.is_done = True
            self._changed()

        for peer in asking.newcomers:

            def done(reply: Any, peer: PeerId = peer) -> None:
                answered(peer, reply)

            self._ask(peer, Prepare(asking.plan), PREPARE_SECONDS_MAX, done)

    def _release(self, asking: _Asking) -> None:
        for peer in asking.newcomers:
            self._ask(peer, Release(plan_hash(asking.plan)), PREPARE_SECONDS_MAX, nothing)

    def _mind(self, found: Hopeless | None) -> None:
        """What looks hopeless may be so for a moment only: who is missing comes back."""
        now = self._setting.ground.now
        if found is None:
            self._hopeless_since = None
        elif self._hopeless_since is None:
            self._hopeless_since = now
        since = now if self._hopeless_since is None else self._hopeless_since
        if found is None or now - since >= REFILL_SECONDS:
            self._hopeless(found, found is not None and now - since >= found.waits_seconds)


def nothing(reply: Any) -> None:
    """Nobody waits for it."""
