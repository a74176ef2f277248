"""A world in memory for the chain of plans: members, their disks, a network and all faults.

Virtual time is one heap of events, and a seed determines a history. The shell of each member works like
`partition.run.stored_chain`: it stores what is unsaved, sends, and then handles the events; it may crash
between any two of these. From outside, the world checks what was decided, and what each member has ever
promised on the wire. `Broken` names the violation.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from typing import Any

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.change import Change, Joining, decode_change, successor
from partition.plan.paxos import (
    ChainBroken,
    ForkBehind,
    ForkFound,
    LeftBehind,
    PaxosChain,
    PlanDecided,
    QuorumFound,
    QuorumLost,
)
from partition.plan.paxos_messages import Accept, Accepted, Ballot, ChainHead, Prepare, Promised
from partition.plan.plan import NO_HASH, Plan, StagePlan, committee, plan_hash
from tests.partition.fake_stage import Broken, peer

RUN = bytes(range(32))
HEAD_SECONDS = 5.0
"""Seconds between two position messages of a member."""
NOTICE_SECONDS = 3.0
"""The longest time until SWIM sees which members are alive."""
STEPS = ("before it saves", "before it sends", "amid sending")
"""The points at which a shell may die."""
ROSTER_MAX = 12
HEAL_SECONDS = 200.0
"""How soon after healing a standing wish must be decided: the longest re-send, and a few duels of
proposers."""


def genesis(members: int, stages: int = 1) -> Plan:
    """Return a first plan: one replica per stage, and the others on the roster, with one trainer among
    them."""
    names = sorted(peer(f"m{number}") for number in range(max(members, stages)))
    rows = tuple(StagePlan(index, index + 1, (names[index],), (1,)) for index in range(stages))
    return Plan(
        run=RUN,
        parent=NO_HASH,
        height=0,
        roster=tuple(names),
        trainers=(names[-1],),
        microbatches=4,
        stages=rows,
    )


def any_change(rng: Random, plan: Plan, pool: list[PeerId]) -> Change | None:
    """Return a possible next change, or None if the drawn kind of change does not apply."""
    roster = [PeerId(peer) for peer in plan.roster]
    outside = [each for each in pool if each not in plan.roster]
    match rng.choice(["lose", "lose", "join", "join", "admit", "trainer", "restore", "return"]):
        case "lose":
            change = Change(lost=tuple(sorted(rng.sample(roster, min(len(roster), rng.randint(1, 2))))))
        case "join" if outside and len(roster) < ROSTER_MAX:
            row = Joining(rng.choice(outside), rng.randrange(len(plan.stages)), rng.randint(1, 9))
            change = Change(joined=(row,))
        case "admit" if outside and len(roster) < ROSTER_MAX:
            change = Change(admitted=(rng.choice(outside),))
        case "trainer":
            change = Change(trainers=(rng.choice(roster),))
        case "restore":
            change = Change(restored=bytes([rng.randrange(1, 255)]) * 32, step=rng.randrange(100))
        case "return":
            back = rng.choice(roster)
            change = Change(lost=(back,), joined=(Joining(back, rng.randrange(len(plan.stages)), 5),))
        case _:
            return None
    try:
        successor(plan, change)
    except RemoteProtocolError:
        return None
    return change


@dataclass
class Member:
    """One member: its core while it is up, and its disk, which is always there."""

    me: PeerId
    core: PaxosChain | None
    disk: bytes = b""
    waking: float = float("inf")
    is_lost: bool = False


@dataclass
class Given:
    """The votes of one member in one instance that others have seen. It must never contradict them."""

    promised: Ballot | None = None
    accepted: Ballot | None = None


@dataclass
class World:
    """One run and its members."""

    rng: Random
    first: Plan
    agreement_class: type[PaxosChain] = PaxosChain
    may_fork: bool = False
    tie_breaker: PeerId | None = None
    loss: float = 0.0
    double: float = 0.0
    slow_seconds: float = 0.1
    crashes: float = 0.0
    sends_before_saving: bool = False
    wishing: bool = True
    now: float = 0.0
    events: int = 0
    restarts: int = 0
    resets: int = 0
    pool: list[PeerId] = field(default_factory=list)
    members: dict[PeerId, Member] = field(default_factory=dict)
    islands: dict[PeerId, int] = field(default_factory=dict)
    heap: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    decided: dict[tuple[bytes, bytes], bytes] = field(default_factory=dict)
    plans: dict[bytes, Plan] = field(default_factory=dict)
    samples: dict[bytes, int] = field(default_factory=dict)
    given: dict[tuple[PeerId, bytes, bytes], Given] = field(default_factory=dict)
    sent: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    count: int = 0

    def __post_init__(self) -> None:
        self.pool = [PeerId(each) for each in self.first.roster] + [peer(f"x{n}") for n in range(4)]
        self._note_plan(self.first, 0)
        for name in self.first.roster:
            self._add(PeerId(name), self.first)

    # Time

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedule an action."""
        self.count += 1
        heappush(self.heap, (self.now + seconds, self.count, action))

    def step(self) -> None:
        """Run the next event."""
        self.now, _, action = heappop(self.heap)
        self.events += 1
        action()

    def run(self, seconds: float, *, until: Callable[[], bool] = lambda: False) -> bool:
        """Run for `seconds`, or until `until` holds; return whether it does."""
        end = self.now + seconds
        while self.heap and self.heap[0][0] <= end:
            if until():
                return True
            self.step()
        self.now = end
        return until()

    # Members and their shells

    def _core(self, me: PeerId, plan: Plan, durable: bytes) -> PaxosChain:
        rng = Random(self.rng.getrandbits(64))
        return self.agreement_class(
            me, plan, rng, durable=durable, may_fork=self.may_fork, tie_breaker=self.tie_breaker
        )

    def _add(self, me: PeerId, plan: Plan) -> None:
        member = self.members[me] = Member(me, self._core(me, plan, b""))
        self.islands.setdefault(me, 0)
        self._act(member, lambda core: [])
        self.at(self.rng.random() * HEAD_SECONDS, lambda: self._say(member))
        self._notice(me)

    def _act(self, member: Member, call: Callable[[PaxosChain], Any]) -> None:
        """Act as a shell does: call, store, send, then handle the events. The shell may die in between."""
        core = member.core
        if core is None:
            return
        sends = call(core)
        dies = self.rng.choice(STEPS) if self.rng.random() < self.crashes else ""
        if self.sends_before_saving:
            self._send_all(member, sends)
            sends = []
        if core.unsaved and dies != "before it saves":
            core.unsaved = False
            member.disk = core.durable
        if dies == "amid sending":
            self._send_all(member, sends[: self.rng.randrange(len(sends) + 1)])
        if dies:
            self.crash(member.me)
            return
        self._send_all(member, sends)
        self._watch(core)
        events, core.events[:] = list(core.events), []
        for event in events:
            self._on_event(member, event)
        self._arm(member)

    def _arm(self, member: Member) -> None:
        core = member.core
        if core is None or core.deadline >= member.waking:
            return
        member.waking = core.deadline
        self.at(max(0.0, core.deadline - self.now), lambda: self._wake(member, core))

    def _wake(self, member: Member, core: PaxosChain) -> None:
        if member.core is not core:
            return
        member.waking = float("inf")
        if core.deadline <= self.now:
            self._act(member, lambda core: core.wake(self.now))
            if member.core is core and core.deadline <= self.now:
                raise Broken("a core that is due again as soon as it was woken")
        self._arm(member)

    def crash(self, me: PeerId) -> None:
        """Kill a member at any point of its work. It restarts with its disk after a while."""
        member = self.members[me]
        if member.core is not None:
            member.core = None
            member.waking = float("inf")
            self.at(self.rng.choice((0.1, 2.0, 20.0)) * self.rng.random(), lambda: self.restart(me))
            self._notice_all()

    def restart(self, me: PeerId) -> None:
        """Start a member from the state on its disk."""
        member = self.members[me]
        if member.core is None:
            self.restarts += 1
            member.core = self._core(me, self.first, member.disk)
            member.is_lost = False
            member.waking = float("inf")
            self._act(member, lambda core: [])
            self._notice(me)
            self._wish_later(member)

    def _rejoin(self, member: Member, other: PeerId) -> None:
        """Have a member give up its branch and join `other` as a newcomer."""
        source = self.members[other].core
        if source is None or not self.connected(member.me, other):
            return
        self.resets += 1
        member.is_lost = False
        self._act(member, lambda core: core.rejoin(self.now, source.base, source.chain))

    def _on_event(self, member: Member, event: Any) -> None:
        self.seen[type(event).__name__] += 1
        match event:
            case PlanDecided():
                for name in event.plan.roster:
                    if name not in self.members:
                        self._add(PeerId(name), event.plan)
                self._notice(member.me)
                self._wish_later(member)
            case QuorumLost():
                if member.is_lost:
                    raise Broken("a quorum is lost twice")
                member.is_lost = True
            case QuorumFound():
                member.is_lost = False
            case ForkFound() | LeftBehind():
                if isinstance(event, ForkFound) and not self.may_fork:
                    raise Broken("a fork in a run that allows none")
                self._rejoin(member, event.peer)
            case ForkBehind():
                pass  # the other member joins
            case ChainBroken():
                raise Broken(f"a chain is broken: {event}")

    def _wish_later(self, member: Member) -> None:
        if self.wishing:
            seconds = self.rng.choice((0.0, 1.0, 10.0, 100.0 if self.may_fork else 1.0))
            self.at(seconds * self.rng.random(), lambda: self._wish(member))

    def _wish(self, member: Member) -> None:
        core = member.core
        if core is None or not self.wishing:
            return
        change = any_change(self.rng, core.head, self.pool)
        if change is None:
            self._wish_later(member)
            return
        parent = core.head_hash
        if self.rng.random() < 0.1:
            change = None
        self._act(member, lambda core: core.wish(self.now, change, parent=parent))

    def _say(self, member: Member) -> None:
        core = member.core
        if core is not None:
            self._stand(core)
            self._send_all(member, [row for each in core.acquainted for row in core.tell(each)])
        self.at(HEAD_SECONDS * (0.8 + 0.4 * self.rng.random()), lambda: self._say(member))

    def _stand(self, core: PaxosChain) -> None:
        height, samples = core.head.height, self.samples[core.head_hash]
        core.say(ChainHead(run=RUN, parent=core.head_hash, height=height, samples=samples, step=samples // 4))

    # Network

    def connected(self, one: PeerId, other: PeerId) -> bool:
        """Return whether both members are on one island."""
        return self.islands.get(one, 0) == self.islands.get(other, 0)

    def split(self, islands: int) -> None:
        """Deal all members to this many islands."""
        for me in self.members:
            self.islands[me] = self.rng.randrange(islands)
        self._notice_all()

    def _notice_all(self) -> None:
        for me in self.members:
            self._notice(me)

    def _notice(self, me: PeerId) -> None:
        self.at(self.rng.random() * NOTICE_SECONDS, lambda: self._reach(self.members[me]))

    def _reach(self, member: Member) -> None:
        live = [
            other.me
            for other in self.members.values()
            if other.core is not None and self.connected(member.me, other.me)
        ]
        self._act(member, lambda core: core.reach(self.now, live))

    def _send_all(self, member: Member, sends: Any) -> None:
        for receiver, message in sends:
            self.sent[type(message).__name__] += 1
            self._check_sent(member.me, message)
            for _ in range(2 if self.rng.random() < self.double else 1):
                if self.rng.random() >= self.loss and receiver in self.members:
                    self._carry(member.me, receiver, message)

    def _carry(self, sender: PeerId, receiver: PeerId, message: Any) -> None:
        seconds = self.slow_seconds * self.rng.random() ** 2 * self.rng.choice((1, 1, 1, 1, 10))
        self.at(seconds, lambda: self._deliver(sender, receiver, message))

    def _deliver(self, sender: PeerId, receiver: PeerId, message: Any) -> None:
        member = self.members[receiver]
        core = member.core
        if core is None or not self.connected(sender, receiver):
            return
        before = core.durable, core.deadline
        self._stand(core)
        try:
            self._act(member, lambda core: core.receive(self.now, sender, message))
        except RemoteProtocolError as error:
            if "on no roster" not in str(error):
                raise Broken(f"the honest {sender!r} is refused: {message}: {error}") from error
            # A member that has not heard of a newcomer treats it as unknown.
            if (core.durable, core.deadline) != before or core.events:
                raise Broken("a refused message has changed something") from error

    # Invariants

    def _check_sent(self, me: PeerId, message: Any) -> None:
        """Check that no vote on the wire contradicts an earlier one, whatever came in between."""
        if not isinstance(message, Prepare | Promised | Accept | Accepted):
            return
        given = self.given.setdefault((me, message.parent, message.fork), Given())
        ballot = message.ballot
        if given.promised is not None and ballot < given.promised:
            raise Broken(f"{me!r} goes below its promise {given.promised}: {message}")
        if isinstance(message, Promised) and given.accepted is not None:
            told = message.accepted
            if told is None or told < min(given.accepted, ballot):
                raise Broken(f"{me!r} has forgotten that it accepted {given.accepted}: {message}")
        given.promised = ballot
        if isinstance(message, Accept | Accepted):
            given.accepted = ballot

    def _watch(self, core: PaxosChain) -> None:
        """Check each link that a member believes in: it must be the only one for its parent in every member's
        chain."""
        if core.head_hash in self.plans:
            return
        plan = core.base
        for link in core.chain:
            change = decode_change(link)
            name = (plan_hash(plan), change.fork)
            if self.decided.setdefault(name, link) != link:
                raise Broken(f"two changes are decided after height {plan.height}: {change}")
            plan = successor(plan, change)
            self._note_plan(plan, self.samples[name[0]])
        heights = Counter(plan.height for plan in self.plans.values())
        if not self.may_fork and max(heights.values()) > 1:
            raise Broken("two plans at one height")

    def _note_plan(self, plan: Plan, samples: int) -> None:
        key = plan_hash(plan)
        if key not in self.plans:
            self.plans[key] = plan
            self.samples[key] = samples + self.rng.randrange(1, 50)

    # Walks

    def disturb(self) -> None:
        """Cause one fault, or repair one."""
        me = self.rng.choice(list(self.members))
        match self.rng.choice(["crash", "crash", "split", "split", "join", "hush", "wish", "wish"]):
            case "crash":
                self.crash(me)
            case "split":
                self.split(self.rng.choice((2, 3, 4) if self.may_fork else (1, 2, 2, 3)))
            case "join":
                self.islands = dict.fromkeys(self.members, 0)
                self._notice_all()
            case "hush":
                self.loss = self.rng.choice((0.0, 0.1, 0.3))
            case "wish":
                self._wish(self.members[me])

    def heal(self) -> None:
        """Make all members reachable, and lose no more messages."""
        self.loss = self.double = self.crashes = 0.0
        self.islands = dict.fromkeys(self.members, 0)
        for me in list(self.members):
            self.restart(me)
        self._notice_all()

    def newest(self) -> Plan:
        """The plan that is expected to win: the plan of the surviving branch."""
        heads = [member.core.head_hash for member in self.members.values() if member.core is not None]
        best = max(heads, key=lambda key: (self.samples[key], self.samples[key] // 4, [-n for n in key]))
        return self.plans[best]

    def agrees(self) -> bool:
        """Return whether every member on the newest plan's roster knows that plan."""
        plan = self.newest()
        # A newcomer whose plan was just chosen may not have heard of it yet.
        members = [self.members.get(PeerId(each)) for each in plan.roster]
        return all(each is not None and each.core is not None and each.core.head == plan for each in members)

    def check_liveness(self) -> None:
        """Check that after healing all members agree, and that the committee's wish is soon decided."""
        self.wishing = False
        self.heal()
        if not self.run(HEAL_SECONDS, until=self.agrees):
            raise Broken("they do not agree after healing")
        height = self.newest().height
        for each in committee(self.newest()):
            member = self.members[each]
            change = Change(trainers=(each,))
            self._act(member, lambda core, change=change: core.wish(self.now, change))  # type: ignore[misc]  # its default
        if not self.run(HEAL_SECONDS, until=lambda: self.newest().height > height and self.agrees()):
            raise Broken("a standing wish is not decided")


def walk(
    seed: int, *, actions: int = 15, may_fork: bool = False, breaks_ties: bool = False, **given: Any
) -> World:
    """Walk one history; raise Broken with the seed. Parameters that are not `given` are drawn. With
    `breaks_ties` the first peer on the roster breaks ties, and there are few members.
    """
    rng = Random(seed)
    drawn: dict[str, Any] = {
        "first": genesis(rng.choice((1, 2, 3, 4, 5, 7, 9, 12)), rng.randint(1, 2)),
        "loss": rng.choice((0.0, 0.05, 0.3)),
        "double": rng.choice((0.0, 0.1)),
        "slow_seconds": rng.choice((0.05, 0.3, 2.0)),
        "crashes": rng.choice((0.0, 0.002, 0.02)),
    }
    if breaks_ties:
        drawn["first"] = genesis(rng.choice((2, 2, 3, 4, 6)), rng.randint(1, 2))
        drawn["tie_breaker"] = drawn["first"].members[0]
    world = World(rng, may_fork=may_fork, **(drawn | given))
    pause = rng.choice((5.0, 60.0)) if may_fork else rng.choice((0.5, 3.0, 15.0))
    try:
        for member in list(world.members.values()):
            world._wish_later(member)
        for _ in range(actions):
            world.run(2 * pause * rng.random())
            world.disturb()
        world.check_liveness()
    except Broken as broken:
        raise Broken(f"seed {seed}: {broken}") from broken
    return world
