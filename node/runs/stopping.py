"""A person's actions on an active run: stop it for all its members, or drop it on this node alone.

A stop is signed by the run's requester, so every member accepts it from anybody, ends the run, keeps the stop
and passes it on. A member that was away learns of the stop when it asks for the rest of the chain of plans.
Dropping needs no signature: this node closes its stage immediately, and the others continue without it.
"""

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, Signer
from crypto.identity import PeerId, short_peer
from node.errors import RunFailed, Unreachable, UsageError
from node.protocols.manifest import MANIFEST_BYTES_MAX, Run, check_run
from node.protocols.runs import Reply, Request, Stop
from node.runs.archive import RUNS_FOLDER, ArchiveShell
from node.runs.local_mode import LocalMode
from node.runs.member import RunMember
from node.runs.outside import RunsOutside
from node.runs.progress import ShownSteps
from node.seams import Seams
from partition.plan.plan import Hash
from partition.run.asks import Declined, Done

STOP_PURPOSE = "run-stop"
STOP_BYTES_MAX = 64
TELL_SECONDS_MAX = 30.0
"""How long the delivery to live members takes at most. An absent member learns of the stop when it
returns."""
ASK_SECONDS_MAX = 5.0
RETRY_SECONDS = 1.0
DECLINES_MAX = 5
"""Number of refusals that are tolerated, because a member may receive the stop before the run's start."""
TOLD_AT_ONCE_MAX = 16
STOP_SECONDS = 5.0
"""How long a person waits for the number of members that know; delivery continues after that."""
STOPPED = "its requester stopped it"
DROPPED = "dropped on this node; the others go on without it"
_FILE = "asked"


class StopBody(msgspec.Struct, frozen=True, array_like=True):
    """The requester's statement that its run has ended."""

    run: Hash


def asked_name(run: str) -> str:
    """Return the storage name of the manifest of a run that this node requested; it is kept until the run has
    ended."""
    return f"{RUNS_FOLDER}/{run}/{_FILE}"


def make_stop(signer: Signer, run: Run) -> Fact:
    """Sign, as the requester, that this run has ended."""
    return signer.sign(STOP_PURPOSE, encode(StopBody(run.id)))


@dataclass
class Delivery:
    """The delivery of a stop: how many members know (`told`), and which do not yet (`left`)."""

    left: set[PeerId]
    told: int = 0
    over: trio.Event = field(default_factory=trio.Event)


class StoppingService(Protocol):
    """The part of `node.runs.runs.Runs` that this file uses."""

    seams: Seams
    signer: Signer
    members: dict[bytes, RunMember]
    archive: ArchiveShell
    local: LocalMode
    outside: RunsOutside
    live: Callable[[], Collection[PeerId]]

    async def ask(self, peer: PeerId, request: Request, seconds: float) -> Reply: ...
    def start_task(self, task: Callable[..., Any], *arguments: object, of: Run | None) -> None: ...


class Stopping:
    """The stops and drops of one node."""

    def __init__(self, runs: StoppingService) -> None:
        self._runs = runs

    def asked(self, run: Run) -> None:
        """Store a run that this node requests. From now on it can stop the run, even when it is no longer a
        member."""
        self._runs.seams.storage.write(asked_name(run.text), encode(run.fact))

    def over(self, run: str) -> None:
        """Record that a run has ended and cannot be stopped any more."""
        self._runs.seams.storage.delete(asked_name(run))

    def known(self) -> list[str]:
        """Return the short ids of the runs that can be stopped or dropped here."""
        names = self._runs.seams.storage.sizes(RUNS_FOLDER)
        found = [name.removeprefix(f"{RUNS_FOLDER}/").partition("/") for name in names]
        asked = [run for run, _, file in found if file == _FILE]
        return list(dict.fromkeys([run.text for run in self._going] + asked))

    @property
    def _going(self) -> list[Run]:
        runs = self._runs
        exact = [member.run for member in runs.members.values()]
        local = [member.run for member in runs.local.members.values()]
        return exact + local + [run for run in runs.outside.runs if run.id not in runs.members]

    async def stop(self, text: str) -> dict[str, object]:
        """End one of this node's own runs for all members; return how many members know, and how many do not
        yet.

        Raises UsageError if the run belongs to another peer, RunFailed if it is not active.
        """
        run = self.find(text)
        if run.requester != self._runs.signer.peer:
            raise UsageError(
                (
                    f"run {text[:8]} was requested by {short_peer(run.requester)}, and only "
                    "its requester may stop it"
                ),
                f"leave it: `peerloom runs drop {text[:8]}`",
            )
        delivery = await self._end(run, make_stop(self._runs.signer, run))
        with trio.move_on_after(STOP_SECONDS):
            await delivery.over.wait()
        return {"run": text, "status": "stopped", "told": delivery.told, "left": len(delivery.left)}

    async def drop(self, text: str) -> dict[str, object]:
        """Leave another peer's run immediately and permanently. Raises UsageError if the run is this node's
        own, RunFailed if it is not active."""
        run = self.find(text)
        if run.requester == self._runs.signer.peer:
            raise UsageError(
                f"run {text[:8]} is this node's own run", f"stop it for all: `peerloom runs stop {text[:8]}`"
            )
        # Recorded first, so that the run does not come back after a restart.
        await self._runs.archive.note(run, ShownSteps(), "stopped", DROPPED, "", is_here=False)
        member = self._runs.members.get(run.id)
        if member is not None:
            await member.drop(DROPPED)
        local = self._runs.local.members.get(run.id)
        if local is not None:
            await self._runs.local.give_up(run.id, "stopped", DROPPED)
        if self._runs.outside.has(run.id):
            self._runs.outside.give_up(run.id, DROPPED)
        return {"run": text, "status": "stopped"}

    async def take(self, fact: Fact) -> Reply:
        """Handle a stop that a peer passes on. Raises RemoteProtocolError."""
        body: StopBody = decode(fact.body, StopBody, bytes_max=STOP_BYTES_MAX)
        author = self._runs.signer.check(STOP_PURPOSE, fact)
        runs = self._runs
        member = (
            runs.members.get(body.run) or runs.local.members.get(body.run) or runs.outside.by_run(body.run)
        )
        if member is None:
            over = self._runs.archive.is_over(body.run)
            return Done() if over else Declined("no such run here")
        if author != member.run.requester:
            raise RemoteProtocolError("a run was stopped by a peer that is not its requester")
        await self._end(member.run, fact)
        return Done()

    async def _end(self, run: Run, fact: Fact) -> Delivery:
        """End the run here, and start the delivery of the stop to the other members."""
        runs = self._runs
        member, delivery = runs.members.get(run.id), self.delivery(run)
        runs.start_task(self.tell, Stop(fact), delivery, of=None)
        member = member or runs.outside.recall(run.id)
        if member is not None:
            member.stopped_by = fact
            await member.end("stopped", STOPPED, "")
        elif run.id in runs.local.members:
            await runs.local.stop(run.id, fact, STOPPED)
        else:
            await runs.archive.note(
                run, ShownSteps(), "stopped", STOPPED, "", is_here=False, stop=fact, for_all=True
            )
        self.over(run.text)
        return delivery

    def delivery(self, run: Run) -> Delivery:
        """Return a new delivery of a run's stop. If this node is no longer a member, it addresses all live
        peers, since any of them may be a member."""
        member, live = self._runs.members.get(run.id), set(self._runs.live())
        known: Collection[PeerId] = live if member is None else member.acquainted & live
        return Delivery(set(known) - {self._runs.signer.peer})

    async def tell(self, request: Request, delivery: Delivery) -> None:
        """Send the request to all peers in `delivery.left`. An absent member learns of it when it returns."""
        limiter = trio.CapacityLimiter(TOLD_AT_ONCE_MAX)

        async def tell(peer: PeerId) -> None:
            for _ in range(DECLINES_MAX):
                async with limiter:
                    with suppress(Unreachable):
                        if isinstance(await self._runs.ask(peer, request, ASK_SECONDS_MAX), Done):
                            delivery.told += 1
                            break
                await trio.sleep(RETRY_SECONDS)
            delivery.left.discard(peer)

        with trio.move_on_after(TELL_SECONDS_MAX):
            async with trio.open_nursery() as nursery:
                for peer in sorted(delivery.left):
                    nursery.start_soon(tell, peer)
        delivery.over.set()

    def find(self, text: str) -> Run:
        """Return a run that is active here, or that this node requested. Raises RunFailed."""
        for run in self._going:
            if run.text == text:
                return run
        data = self._runs.seams.storage.read(asked_name(text))
        with suppress(RemoteProtocolError):
            if data is not None:
                fact: Fact = decode(data, Fact, bytes_max=2 * MANIFEST_BYTES_MAX)
                return check_run(self._runs.signer, fact)
        raise RunFailed(f"run {text[:8]} is not active here", "look: `peerloom runs`")
