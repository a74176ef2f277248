"""If a stage has no holder, a member with a different stage takes it until another node does."""

from crypto.identity import Identity, PeerId
from partition.serve.backoff import (
    FORGIVEN_ENDS,
    REST_SECONDS_MAX,
    REST_SECONDS_MIN,
    SOUND_SECONDS,
    StageBackoff,
)
from partition.serve.messages import Roll, ServiceRow
from partition.serve.upkeep import (
    FORGET_SECONDS,
    RELIEF_SECONDS,
    STAGES_PER_PEER_MAX,
    Recruit,
    Relieved,
    RosterChanged,
    ServiceUpkeep,
)

SERVICE = bytes(32)
A, B, C, D = (Identity(bytes([1 + number]) * 32).peer for number in range(4))


class Swarm:
    """Members that may hold several stages, and free nodes."""

    def __init__(self, members: dict[PeerId, int], stages: int, room: int = 2) -> None:
        self.now = 0.0
        self.stages, self.room = stages, room
        self.free: list[PeerId] = []
        self.cores: dict[tuple[PeerId, int], ServiceUpkeep] = {}
        rows = [ServiceRow(peer, stage, True) for peer, stage in members.items()]
        for peer, stage in members.items():
            self.join(peer, stage, rows)

    def join(self, peer: PeerId, stage: int, rows: list[ServiceRow] | tuple[ServiceRow, ...]) -> None:
        is_stopgap = bool(self.held(peer))
        core = ServiceUpkeep(self.now, peer, SERVICE, self.stages, 1, stage, rows, is_stopgap=is_stopgap)
        self.cores[peer, stage] = core
        self.send(peer, core.ready(self.now))

    def held(self, peer: PeerId) -> list[int]:
        return sorted(stage for who, stage in self.cores if who == peer)

    def send(self, sender: PeerId, sends: list[tuple[PeerId, Roll]]) -> None:
        for receiver, message in sends:
            for (who, _), core in list(self.cores.items()):
                if who == receiver:
                    core.receive(self.now, sender, message)

    def kill(self, peer: PeerId) -> None:
        self.cores = {key: core for key, core in self.cores.items() if key[0] != peer}
        for core in self.cores.values():
            core.lost(self.now, peer)

    def let_go(self, peer: PeerId, stage: int) -> None:
        core = self.cores.pop((peer, stage))
        self.send(peer, core.leave())
        for left in self.held(peer)[:1] if not core.is_stopgap else ():
            self.cores[peer, left].stay(self.now)

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds * 4)):
            self.now += 0.25
            for (peer, stage), core in list(self.cores.items()):
                self.send(peer, core.wake(self.now))
                events, core.events = core.events, []
                for event in events:
                    match event:
                        case Recruit():
                            self.recruit(peer, core, event)
                        case Relieved():
                            self.let_go(peer, stage)
                        case RosterChanged():
                            pass

    def recruit(self, peer: PeerId, core: ServiceUpkeep, event: Recruit) -> None:
        taker = self.free.pop() if self.free else None
        if taker is None and event.is_empty and len(self.held(peer)) < self.room:
            taker = peer
        if taker is not None:
            self.join(taker, event.stage, core.rows())
        core.recruited(self.now, event.stage, taker)


def test_the_remaining_member_also_takes_the_missing_stage() -> None:
    swarm = Swarm({A: 0, B: 1}, 2)
    swarm.run(4)
    swarm.kill(B)
    swarm.run(4)
    assert swarm.held(A) == [0, 1]
    # The member keeps looking for another node. It releases the stage once that node has answered for a
    # while.
    swarm.free = [C]
    swarm.cores[A, 0].offered(swarm.now)
    swarm.run(RELIEF_SECONDS / 2)
    assert (swarm.held(A), swarm.held(C)) == ([0, 1], [1])
    swarm.run(RELIEF_SECONDS)
    assert (swarm.held(A), swarm.held(C)) == ([0], [1])


def test_one_member_takes_all_stages_if_it_has_room() -> None:
    swarm = Swarm({A: 0, B: 1, C: 2}, 3, room=3)
    swarm.run(4)
    swarm.kill(B)
    swarm.kill(C)
    swarm.run(FORGET_SECONDS + 6)
    assert swarm.held(A) == [0, 1, 2]
    swarm.free = [B, C]
    swarm.cores[A, 0].offered(swarm.now)
    swarm.run(RELIEF_SECONDS + 5)
    assert swarm.held(A) == [0]
    assert {*swarm.held(B), *swarm.held(C)} == {1, 2}


def test_a_member_offers_a_missing_stage_again_once_its_own_is_loaded() -> None:
    core = ServiceUpkeep(0.0, A, SERVICE, 2, 1, 0, [])

    def wanted(now: float) -> list[int]:
        core.wake(now)
        events, core.events = core.events, []
        return [event.stage for event in events if isinstance(event, Recruit)]

    offers = 0
    for now in range(8):
        for stage in wanted(now):
            core.recruited(now, stage, None)
            offers += 1
    assert offers == 3
    assert core.is_paused
    core.ready(8.0)
    assert wanted(8.0) == [1]


def test_a_stopgap_stays_while_the_leaving_node_still_answers() -> None:
    swarm = Swarm({A: 0, B: 1}, 2)
    swarm.run(4)
    swarm.join(A, 1, swarm.cores[A, 0].rows())  # the leaving member has asked for it
    swarm.run(RELIEF_SECONDS - 2)
    swarm.let_go(B, 1)
    swarm.run(2 * RELIEF_SECONDS)
    assert swarm.held(A) == [0, 1]


def test_a_stopgap_becomes_permanent_once_the_first_stage_is_gone() -> None:
    swarm = Swarm({A: 0, B: 1}, 2)
    swarm.run(4)
    swarm.kill(B)
    swarm.run(4)
    swarm.free = [C]
    swarm.let_go(A, 0)  # its process has died
    swarm.run(4)
    assert (swarm.held(A), swarm.held(C)) == ([1], [0])
    assert not swarm.cores[A, 1].is_stopgap


def test_a_peer_that_claims_to_hold_everything_fills_no_memory() -> None:
    core = ServiceUpkeep(0.0, A, SERVICE, 64, 1, 0, [ServiceRow(B, 1, True)])
    for stage in range(64):
        core.receive(0.0, B, Roll(SERVICE, stage, True))
    assert sum(row.peer == B for row in core.rows()) == STAGES_PER_PEER_MAX
    core.lost(1.0, B)
    assert not core.has(B)
    assert [row.peer for row in core.rows()] == [A]


def test_a_peer_that_cannot_load_a_stage_is_asked_ever_less_often() -> None:
    core = ServiceUpkeep(0.0, A, SERVICE, 2, 1, 0, [ServiceRow(B, 0, True)])
    attempts: list[tuple[float, PeerId]] = []
    for now in range(1_000):
        core.receive(now, B, Roll(SERVICE, 0, True))
        core.receive(now, A, Roll(SERVICE, 0, True))
        core.wake(now)
        events, core.events = core.events, []
        for event in events:
            if isinstance(event, Recruit):
                able = [peer for peer in (A, B) if event.is_empty and peer not in event.failed]
                attempts += [(now, peer) for peer in able[:1]]
                core.recruited(now, event.stage, able[0] if able else None)
                for peer in able[:1]:  # the release arrives before the report that the peer answers
                    core.receive(now + 0.5, peer, Roll(SERVICE, 1, False, True))
    assert [peer for _, peer in attempts[:2]] == [A, B], (
        "the failing peer was asked again before the other peer"
    )
    for peer in (A, B):
        times = [at for at, each in attempts if each == peer]
        assert 1_000 / REST_SECONDS_MAX <= len(times) <= 6 + 1_000 / REST_SECONDS_MAX


def ends_and_rests(answers_seconds: float, count: int) -> list[float]:
    """Have B's stage end `count` times, each time after it answered for this long. Return for how long B is
    not asked for the stage after each end."""
    core = ServiceUpkeep(0.0, A, SERVICE, 2, 1, 0, [ServiceRow(B, 0, True), ServiceRow(C, 1, True)])
    now, rests = 10.0, []
    for _ in range(count):
        ended = now + answers_seconds
        while now < ended:
            core.receive(now, B, Roll(SERVICE, 0, True))
            core.receive(now, C, Roll(SERVICE, 1, True))
            core.wake(now)
            now += min(1.0, ended - now)
        core.receive(now, C, Roll(SERVICE, 1, False, True))
        core.receive(now, B, Roll(SERVICE, 0, True))
        began = now
        while True:
            core.receive(now, B, Roll(SERVICE, 0, True))
            core.wake(now)
            wanted = [event for event in core.events if isinstance(event, Recruit) and event.stage == 1]
            core.events = []
            if wanted and C not in wanted[0].failed:
                break
            for event in wanted:
                core.recruited(now, event.stage, None)
            now += 0.5
        rests.append(now - began)
        core.recruited(now, 1, C)
        core.receive(now, C, Roll(SERVICE, 1, True))
    return rests


def test_a_stage_that_keeps_failing_pauses_longer_each_time() -> None:
    rests = ends_and_rests(10.0, FORGIVEN_ENDS + 3)
    assert max(rests[:FORGIVEN_ENDS]) <= 3.0, "the peer rested although its first ends may be chance"
    assert rests[FORGIVEN_ENDS] >= REST_SECONDS_MIN
    assert rests[FORGIVEN_ENDS + 2] >= 4 * REST_SECONDS_MIN


def test_a_stage_that_answered_for_long_does_not_rest() -> None:
    assert max(ends_and_rests(SOUND_SECONDS + 1, FORGIVEN_ENDS + 2)) <= 3.0


def test_a_sound_stage_lost_silently_forgets_earlier_failures() -> None:
    core = ServiceUpkeep(0.0, A, SERVICE, 2, 1, 0, [ServiceRow(B, 0, True), ServiceRow(C, 1, False)])
    now = 0.0
    for _ in range(6):  # failed loads
        core.receive(now, C, Roll(SERVICE, 1, False))
        core.receive(now, C, Roll(SERVICE, 1, False, True))
        core.recruited(now, 1, C)
    for _ in range(int(REST_SECONDS_MAX + SOUND_SECONDS)):
        now += 1
        core.receive(now, C, Roll(SERVICE, 1, True))
    core.lost(now, C)
    core.recruited(now, 1, C)
    core.events = []
    core.receive(now, C, Roll(SERVICE, 1, False, True))  # one failed load
    began, wanted = now, list[Recruit]()
    while not wanted or C in wanted[0].failed:
        now += 0.5
        core.receive(now, B, Roll(SERVICE, 0, True))
        core.wake(now)
        wanted = [event for event in core.events if isinstance(event, Recruit) and event.stage == 1]
        for event in wanted:
            core.recruited(now, event.stage, None)
        core.events = []
    assert now - began <= 4 * REST_SECONDS_MIN, "the rest is longer than after a first failure"


def test_forgiving_a_failure_does_not_shorten_a_rest() -> None:
    rests: StageBackoff[str] = StageBackoff(4)
    rests.note_end(0.0, "stage", None)
    rests.note_end(1.0, "stage", 0.5)
    assert rests.rest_left(1.0, "stage") == REST_SECONDS_MIN - 1
