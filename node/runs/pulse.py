"""Whether a run still goes on: its committer says so from time to time, and hears who has forgotten it.

SWIM says who is dead; here is what it cannot see: a member that was restarted so fast that nobody missed it,
and a run that nobody speaks of any more, whose slot must not be held for ever.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress

import trio

from crypto.identity import PeerId
from node.errors import Unreachable
from node.runs.placement import START_SECONDS_MAX
from node.runs.requests import Declined, Renew
from node.runs.service import Service
from partition.plan.plan import Plan, plan_hash

RENEW_SECONDS = 20.0
"""How often a committer says that the run goes on, and hears who has forgotten it: a step may take
minutes."""
RENEW_SECONDS_MAX = 10.0
SILENCE_SECONDS_MAX = 2 * START_SECONDS_MAX
"""Nothing heard of a run for so long: its stage is closed and its slot is free again. Time enough for the
others to find another committer first."""
COMMITTER_SILENCE_SECONDS_MAX = START_SECONDS_MAX + 30
"""A committer that lives but says nothing for so long has forgotten the run: it was restarted."""
PAUSE_SECONDS_MAX = 3_600.0
"""How long a minority waits for the others before it gives its slots back."""


class Pulse:
    """One member's. `plan` is the one in force; `beat` is called at every turn."""

    def __init__(
        self,
        service: Service,
        run: bytes,
        *,
        plan: Callable[[], Plan | None],
        others: Callable[[Plan], list[PeerId]],
        waits: Callable[[], bool],
        beat: Callable[[], None],
        absent: Callable[[PeerId, str], None],
        give_up: Callable[[str], Awaitable[None]],
    ) -> None:
        """`others` are the living of a plan; `waits` is whether a minority waits for a majority. `absent` is
        told who has forgotten the run, `give_up` that nobody speaks of it any more."""
        self._service = service
        self._run = run
        self._plan = plan
        self._others = others
        self._waits = waits
        self._beat = beat
        self._absent = absent
        self._give_up = give_up
        self.heard()

    def heard(self) -> None:
        """Somebody says that the run goes on."""
        self._heard_at = self._service.seams.clock.monotonic()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await trio.sleep(RENEW_SECONDS)
            self._beat()
            plan = self._plan()
            if plan is None:
                continue
            if plan.committer != self._service.signer.peer:
                await self._mind_silence(plan)
                continue
            self.heard()
            async with trio.open_nursery() as nursery:
                for peer in self._others(plan):
                    nursery.start_soon(self._renew, peer, plan)

    async def _renew(self, peer: PeerId, plan: Plan) -> None:
        with suppress(Unreachable):  # whether it is dead is for SWIM to say
            request = Renew(self._run, plan_hash(plan))
            reply = await self._service.ask(peer, request, RENEW_SECONDS_MAX)
            if isinstance(reply, Declined) and plan == self._plan():
                self._absent(peer, "it has forgotten the run")

    async def _mind_silence(self, plan: Plan) -> None:
        silence = self._service.seams.clock.monotonic() - self._heard_at
        if silence >= (PAUSE_SECONDS_MAX if self._waits() else SILENCE_SECONDS_MAX):
            await self._give_up(f"nothing was heard of the run for {silence:.0f} s")
        elif silence >= COMMITTER_SILENCE_SECONDS_MAX:
            self._absent(plan.committer, f"it said nothing for {silence:.0f} s")
