"""The averaging service of a node: takes part in named runs, forms groups, averages, and passes on states.

Participants are found by direct announcements: this node greets the members of the swarm (`gossip.roster`),
and also peers that declare in the DHT that they take part, since a member list need not contain all of a
public swarm. A round is a search for a group (`gossip.matchmaking`), followed by an attempt
(`gossip.averaging.attempt`) on streams. If a run has more participants than a node keeps, members of a group
find each other through records in the DHT under the group's key, which expire with the search.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from random import Random

import trio

from crypto.encoding import decode
from crypto.errors import RemoteProtocolError
from crypto.facts import Signer
from crypto.identity import PeerId
from dht.groups import Origins
from gossip import matchmaking, roster, rosters
from gossip.averaging.attempt import Attempt
from gossip.averaging.group import Aggregate
from gossip.averaging.messages import OPENING_BYTES_MAX, Opening
from gossip.averaging.messages import PROTOCOL as ATTEMPT_PROTOCOL
from gossip.averaging.outcome import Averaged
from gossip.averaging.proof_table import ProofStanding
from node.averaging.context import ParticipationService
from node.averaging.declarations import Declarations
from node.averaging.door import TicketGate
from node.averaging.early_streams import EarlyStreams
from node.averaging.invitations import Invitations
from node.averaging.participation import Participation
from node.averaging.proofs import HonestGate, Proofs
from node.averaging.rounds import Gate
from node.averaging.runner import MESSAGE_BYTES_MAX, Runner
from node.averaging.signature import run_key
from node.averaging.snapshot import Snapshot
from node.averaging.transfer import StateServer
from node.averaging_events import AveragingOpened, LiarProved
from node.containment import contain, keep_running
from node.errors import StreamClosed, UsageError
from node.events import Event
from node.seams import Seams, Stream, StreamLimits
from node.services.discovery import Discovery
from node.services.driver import Driver

PURPOSE = "averaging"
"""The purpose of DHT records of a run's participants."""
GROUP_PURPOSE = "averaging-group"
"""The purpose of DHT records of peers that want a group with a key."""
GROUP_LOOK_SECONDS = 1.0
"""Seconds between two searches for other peers that want the same group."""
STREAMS = StreamLimits(message_bytes_max=MESSAGE_BYTES_MAX, streams_per_peer_max=32)
"""Limits on streams. One peer has a stream for each attempt. It stays open a little beyond the attempt's
result, and rounds may follow quickly, so several may be open at once."""
DECLINED_MAX = 128
"""Maximum number of remembered refusals by members that declined a group before this node began its
attempt."""
LOOK_SECONDS_MIN, LOOK_SECONDS_MAX = 2.0, 60.0
"""Shortest and longest time between two searches for participants, in the member list and in the DHT. It is
short while this node is alone, and grows otherwise."""


class Averaging:
    """The averaging service. `run` drives it; `open` joins a run."""

    def __init__(
        self,
        seams: Seams,
        signer: Signer,
        discovery: Discovery,
        rng: Random,
        *,
        live: Callable[[], Collection[PeerId]],
        publish: Callable[[Event], None],
        refuse: Callable[[PeerId, RemoteProtocolError], None],
        is_private: bool = False,
        participants_max: int = roster.PARTICIPANTS_MAX,
    ) -> None:
        """At most `participants_max` participants of a run are kept. `is_private`: the swarm has a key."""
        self.is_private = is_private
        self._seams = seams
        self.clock = seams.clock
        self._signer = signer
        self._discovery = discovery
        self._live = live
        self._publish = publish
        self._refuse = refuse
        origins = Origins(groups_local=False, host_of=seams.network.host_of)
        self._rosters = rosters.Rosters(
            seams.network.peer,
            rng,
            participants_max=participants_max,
            network_of=lambda peer: origins.group(peer, ()),
        )
        self._matches = matchmaking.Matchmaking(seams.network.peer)
        self._roster_driver = self._driver(self._rosters, roster, self._heard_of)
        self._match_driver = self._driver(self._matches, matchmaking, self._matched)
        self._runs: dict[bytes, Participation] = {}
        self._runners: dict[bytes, Runner] = {}
        self._declined: list[tuple[bytes, PeerId]] = []
        self._stirred = trio.Event()
        self.invitations = Invitations(seams, signer, refuse)
        self.early = seams.part(EarlyStreams)(self._early_rank)
        """Streams that wait for an attempt that is not known here yet."""
        self._nursery: trio.Nursery | None = None
        self.averaged: Callable[[bytes, Mapping[PeerId, int], int], None] = lambda _run, _came, _sent: None
        """Called for each attempt that succeeded here, with its run's key, the tensor bytes from each member
        in the result, and the bytes sent."""
        self.proofs = Proofs(
            seams,
            signer,
            members=self._members_of,
            standing=self._standing,
            found=self._liar_found,
            refuse=refuse,
        )
        """The proofs against members of runs that lied."""
        seams.network.handle(ATTEMPT_PROTOCOL, self._serve, STREAMS)
        StateServer(seams.network, self._snap, self._kept)

    def _driver(self, core: object, module: object, publish: Callable[[object], None]) -> Driver:
        return Driver(
            core,  # type: ignore[arg-type]  # both modules have the shape of a core
            module.PROTOCOL,  # type: ignore[attr-defined]  # both have
            module.Message,  # type: ignore[attr-defined]  # both have
            message_bytes_max=module.MESSAGE_BYTES_MAX,  # type: ignore[attr-defined]  # both have
            network=self._seams.network,
            clock=self._seams.clock,
            publish=publish,
            refuse=self._refuse,
        )

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await nursery.start(self._roster_driver.run)
            await nursery.start(self._match_driver.run)
            await nursery.start(self.invitations.run)
            await self.proofs.run(nursery)
            task_status.started()

    @property
    def runs(self) -> tuple[Participation, ...]:
        """The runs that this node takes part in."""
        return tuple(self._runs.values())

    @property
    def runners(self) -> tuple[Runner, ...]:
        """The attempts that this node takes part in now, or has not closed yet."""
        return tuple(self._runners.values())

    def open(
        self,
        name: str,
        signature: bytes,
        gate: Gate | None = None,
        aggregate: Aggregate = "mean",
        alike: Mapping[bytes, str] | None = None,
        door: TicketGate | None = None,
    ) -> Participation:
        """Join the run with this name and the peers that `gate` admits, averaging by the rule `aggregate`,
        which `signature` covers. `alike` are the signatures of the same tensors under other rules. `door` is
        the gate of a run of invited peers (`node.averaging.invitations`). Raises UsageError if this node is
        already in the run, or in too many."""
        key = run_key(name) if door is None else door.admission.run
        # otherwise it is a run in local mode, which declares itself
        is_named = door is not None or gate is None
        clock = self._seams.clock
        try:
            gate = HonestGate(self.proofs, key, gate if door is None else door)
            entry = self._rosters.open(
                key, signature, clock.monotonic(), int(clock.wall() * 1000), gate.admits
            )
        except ValueError as error:
            raise UsageError(f"run {name!r}: {error}") from None
        assert self._nursery is not None, "the service is running"
        scope = trio.CancelScope()
        service = ParticipationService(
            self._seams,
            self._signer,
            publish=self._publish,
            refuse=self._refuse,
            tell=lambda order: self._roster_driver.command(order),
            match=lambda order: self._match_driver.command(order),
            matches=self._matches,
            start=self._start,
            declare=self._declare_group,
            averaged=self._count,
            close=lambda: self._close(key, scope),
        )
        make = self._seams.part(Participation)
        found = self._runs[key] = make(name, key, entry, service, gate, aggregate, alike)
        if door is not None:
            self.invitations.open(found, door)
        if is_named:
            self._publish(
                AveragingOpened(
                    at=clock.wall(),
                    run=name,
                    admit="open" if door is None else door.admit,
                    aggregate=aggregate,
                    is_private=self.is_private,
                )
            )
        self._nursery.start_soon(self._look_for_others, found, scope, door)
        return found

    def find(self, name: str, signature: bytes, door: TicketGate | None = None) -> Participation | None:
        """Return this node's participation in the run with this name; None if there is none. Raises
        UsageError if this node averages different tensors under this name."""
        run = self._runs.get(run_key(name) if door is None else door.admission.run)
        if run is not None and run.roster.signature != signature:
            other = f"these tensors by {run.aggregate}" if signature in run.alike else ""
            raise UsageError(
                f"run {name!r}: this node averages {other or 'tensors with other names or shapes'} in it"
            )
        return run

    def member_lost(self, peer: PeerId) -> None:
        """Handle a peer that membership reports as dead, or that has left."""
        self._roster_driver.command(lambda _: self._rosters.lost(peer))
        self._match_driver.command(lambda now: self._matches.lost(now, peer))
        if self._nursery is not None:
            for runner in list(self._runners.values()):
                if peer in runner.attempt.group.peers:
                    self._nursery.start_soon(runner.lose, peer)

    def _close(self, key: bytes, scope: trio.CancelScope) -> None:
        self._roster_driver.command(lambda _: self._rosters.close(key))
        self._runs.pop(key, None)
        self.invitations.close(key)
        scope.cancel()

    # Participants

    async def _look_for_others(
        self, run: Participation, scope: trio.CancelScope, door: TicketGate | None
    ) -> None:
        """Greet the members of the swarm at growing intervals. Also run the tasks that declare the run in the
        DHT and exchange tickets."""
        with scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(keep_running, "declaring of a run", self._declare, run)
                if door is not None:
                    follow = partial(self.invitations.follow, run, door)
                    nursery.start_soon(keep_running, "tickets of a run", follow)
                pause = LOOK_SECONDS_MIN
                while True:
                    live = list(self._live())
                    self._roster_driver.command(lambda now, live=live: run.roster.introduce(now, live))  # type: ignore[misc]  # bound now
                    await trio.sleep(pause)
                    pause = LOOK_SECONDS_MIN if not run.roster.reports else min(2 * pause, LOOK_SECONDS_MAX)

    async def _declare(self, run: Participation) -> None:
        """Declare in the DHT that this node takes part, and search there for other participants."""
        pause = LOOK_SECONDS_MIN
        declared = Declarations(self._discovery, run.peer, PURPOSE, run.key)
        while True:
            if len(self._live()) > 1:  # while this node is alone, there is nobody to tell or to ask
                await declared.declare(run.roster.signature)
                peers = await declared.look()
                self._roster_driver.command(lambda now, peers=peers: run.roster.introduce(now, peers))  # type: ignore[misc]  # bound now
            await trio.sleep(pause)
            pause = min(2 * pause, LOOK_SECONDS_MAX)

    async def _declare_group(self, key: bytes, seconds: float) -> None:
        """Declare in the DHT, for `seconds`, that this node wants a group with this key, and send its wish to
        other peers that declare the same. Runs until cancelled."""
        with contain("declaring of a group"):
            declared = Declarations(self._discovery, self._seams.network.peer, GROUP_PURPOSE, key)
            until = self.clock.monotonic() + seconds
            async with trio.open_nursery() as nursery:
                while True:
                    nursery.start_soon(declared.declare, b"", max(1.0, until - self.clock.monotonic()))
                    peers = await declared.look()
                    self._match_driver.command(lambda _, peers=peers: self._matches.introduce(key, peers))  # type: ignore[misc]  # bound now
                    await trio.sleep(GROUP_LOOK_SECONDS)

    def _heard_of(self, event: object) -> None:
        match event:
            case roster.Left(is_far=True):
                pass  # the peer is alive, and may be in a group with this node
            case roster.Entered(run=key, peer=peer) if key in self._runs:
                self._runs[key].entered(peer)
                self.proofs.introduce(key, peer)
            case roster.Left(run=key, peer=peer, reason=reason) if key in self._runs:
                self._runs[key].left(peer, reason)
                self._match_driver.command(lambda now: self._matches.lost(now, peer))

    # Groups and attempts

    def _matched(self, event: object) -> None:
        if isinstance(event, matchmaking.GroupDeclined):
            runner = self._runners.get(event.attempt)
            if runner is not None and self._nursery is not None:
                self._nursery.start_soon(runner.lose, event.peer)
            elif runner is None:  # the group has just formed, and its attempt is being prepared
                self._declined = [*self._declined[1 - DECLINED_MAX :], (event.attempt, event.peer)]
            return
        for run in self._runs.values():
            run.matched(event)

    def _start(self, runner: Runner) -> None:
        """Start a task that drives an attempt until it is closed."""
        assert self._nursery is not None, "the service is running"
        self._runners[runner.attempt.id] = runner
        stirred, self._stirred = self._stirred, trio.Event()
        stirred.set()
        self._nursery.start_soon(self._drive, runner)
        for attempt, peer in self._declined:
            if attempt == runner.attempt.id:
                self._nursery.start_soon(runner.lose, peer)

    async def _drive(self, runner: Runner) -> None:
        try:
            with contain("averaging attempt"):  # if it fails because of our own bug, its round has failed
                await runner.run()
        finally:
            self._runners.pop(runner.attempt.id, None)
            self.proofs.look(runner.attempt)

    def _count(self, attempt: Attempt, result: Averaged) -> None:
        came = {peer: size for peer, size in attempt.came.items() if peer in result.shares}
        self.averaged(attempt.group.name, came, attempt.sent_bytes)

    def _members_of(self, key: bytes) -> Collection[PeerId] | None:
        run = self._runs.get(key)
        return None if run is None else tuple(run.roster.reports)

    def _standing(self, key: bytes, peer: PeerId) -> ProofStanding:
        run = self._runs.get(key)
        if run is not None and run.expectations.attendance.is_known(peer):
            return ProofStanding.COMPLETED
        return ProofStanding.LISTED if run is not None and run.roster.lists(peer) else ProofStanding.UNKNOWN

    def _liar_found(self, key: bytes, peer: PeerId, purpose: str) -> None:
        run = self._runs[key]
        self._publish(LiarProved(at=self._seams.clock.wall(), run=run.name, peer=peer, said=purpose))

    async def _serve(self, stream: Stream) -> None:
        if not self._runs:
            raise StreamClosed("this node averages nothing")
        if not any(run.admits(stream.peer) for run in self._runs.values()):
            raise StreamClosed("this peer is admitted to no run that this node takes part in")
        with self.early.place(stream.peer):
            opening: Opening = decode(await stream.receive(), Opening, bytes_max=OPENING_BYTES_MAX)
            while (runner := self._runners.get(opening.attempt)) is None:
                await self._stirred.wait()
        await runner.receive_from(stream)

    def _early_rank(self, peer: PeerId) -> int:
        """Return the rank of a peer that wants one of the places in `EarlyStreams`; higher is better."""
        if any(run.expectations.attendance.has_completed(peer) for run in self._runs.values()):
            return 2
        return int(any(run.roster.takes_part(peer) for run in self._runs.values()))

    # States

    async def _snap(self, peer: PeerId, key: bytes, signature: bytes, step: int) -> Snapshot | str:
        run = self._runs.get(key)
        if run is None or run.roster.signature != signature or not run.roster.admits(peer):
            return "this node does not take part in such a run"
        return await run.states.snap(step)

    def _kept(self, peer: PeerId, key: bytes, digest: bytes) -> Snapshot | None:
        run = self._runs.get(key)
        return None if run is None or not run.admits(peer) else run.states.kept(digest)
