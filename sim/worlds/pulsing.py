"""Whether a run in a world of cores still goes on: its committer says so, and hears who has forgotten it. As
`node.runs.pulse`."""

from typing import TYPE_CHECKING, Any

from crypto.identity import PeerId
from node.runs.pulse import (
    COMMITTER_SILENCE_SECONDS_MAX,
    PAUSE_SECONDS_MAX,
    RENEW_SECONDS_MAX,
    SILENCE_SECONDS_MAX,
)
from partition.plan.plan import Plan, plan_hash
from sim.worlds.said import Declined, Renew
from sim.worlds.setting import Setting

if TYPE_CHECKING:
    from sim.worlds.members import Member


class Pulse:
    """One member's."""

    def __init__(self, setting: Setting, member: "Member") -> None:
        self._setting = setting
        self._member = member
        self.heard()

    def heard(self) -> None:
        """Somebody says that the run goes on."""
        self._heard_at = self._setting.ground.now

    def beat(self, plan: Plan) -> None:
        """Every RENEW_SECONDS, under the plan in force."""
        member = self._member
        if member.hosting.is_opening or plan.committer == member.me:
            self.heard()
        if plan.committer == member.me:
            for peer in member.others():
                self._renew(plan, peer)
            return
        silence = self._setting.ground.now - self._heard_at
        if silence >= (PAUSE_SECONDS_MAX if member.is_paused else SILENCE_SECONDS_MAX):
            member.end("failed", f"nothing was heard of the run for {silence:.0f} s")
        elif silence >= COMMITTER_SILENCE_SECONDS_MAX:
            member.miss(plan.committer, f"it said nothing for {silence:.0f} s")

    def _renew(self, plan: Plan, peer: PeerId) -> None:
        def renewed(reply: Any) -> None:
            if isinstance(reply, Declined) and self._member.plan == plan:
                self._member.miss(peer, "it has forgotten the run")

        self._member.ask(peer, Renew(plan_hash(plan)), RENEW_SECONDS_MAX, renewed)
