"""Keepalive of a run: its committer renews it periodically, and learns which members have forgotten it.

SWIM reports dead members. The keepalive covers two cases that SWIM cannot see: a member that restarted so
fast that its absence was not noticed, and a run in which no messages arrive any more. Such a run must not
hold its slot forever.
"""

from collections.abc import Collection
from dataclasses import dataclass

from crypto.identity import PeerId
from partition.plan.plan import Plan
from partition.run.asks import Asks, Declined, RenewRun, Reply
from partition.run.settings import RunSettings


@dataclass(frozen=True)
class MemberSilent:
    """A member under `plan` has forgotten the run, or is the committer and has been silent."""

    plan: Plan
    peer: PeerId
    reason: str


@dataclass(frozen=True)
class RunSilent:
    """No messages of the run arrive any more."""

    reason: str


Event = MemberSilent | RunSilent


class Keepalive:
    """One member's keepalive. `deadline` is the time of the next `wake`."""

    def __init__(self, me: PeerId, now: float, asks: Asks, settings: RunSettings) -> None:
        self.asks = asks
        self.events: list[Event] = []
        self.deadline = now + settings.renew_seconds
        self._settings = settings
        self._me = me
        self._heard_at = now
        self._renewing: dict[int, tuple[Plan, PeerId]] = {}

    def heard(self, now: float) -> None:
        """Note that the run is alive."""
        self._heard_at = now

    def speaking(self, now: float, plan: Plan | None, live: Collection[PeerId]) -> Collection[PeerId]:
        """Return the `live` members, without the committer if it has been silent for too long."""
        is_silent = plan is not None and now - self._heard_at >= self._settings.left_seconds
        return [peer for peer in live if not is_silent or plan is None or peer != plan.committer]

    def wake(
        self, now: float, plan: Plan | None, *, others: Collection[PeerId], is_paused: bool, is_opening: bool
    ) -> None:
        """As the committer, renew the run; as any other member, check how long the run has been silent.

        `others` are the live members of the plan in force, without this one. `is_paused`: the members here
        are a minority, and wait for a majority. `is_opening`: this node's stage is being opened.
        """
        self.deadline = now + self._settings.renew_seconds
        if plan is None:
            return
        if is_opening or plan.committer == self._me:
            self.heard(now)
        if plan.committer == self._me:
            self._renewing.clear()  # later answers to earlier requests are outdated
            for peer in others:
                number = self.asks.put(peer, RenewRun(plan), self._settings.renew_seconds_max)
                self._renewing[number] = plan, peer
            return
        silence = now - self._heard_at
        reason = f"no message of the run arrived for {silence:.0f} s"
        settings = self._settings
        if silence >= (settings.pause_seconds_max if is_paused else settings.silence_seconds_max):
            self.events.append(RunSilent(reason))
        elif silence >= settings.committer_silence_seconds_max:
            reason = f"the committer sent nothing for {silence:.0f} s"
            self.events.append(MemberSilent(plan, plan.committer, reason))

    def replied(self, _now: float, number: int, reply: Reply) -> None:
        """Handle the answer to one of `asks`. SWIM decides whether a peer that does not answer is dead."""
        renewed = self._renewing.pop(number, None)
        if renewed is not None and isinstance(reply, Declined):
            self.events.append(MemberSilent(*renewed, "it has forgotten the run"))
