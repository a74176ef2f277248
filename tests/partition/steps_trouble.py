"""Faults in the world of the step machines, and users' requests at the wrong moment."""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from crypto.identity import PeerId
from partition.plan.change import Change, Joining
from tests.partition.steps_machine import Machine, Sends

if TYPE_CHECKING:
    from tests.partition.steps_world import World

GONE = "the stage process is gone"


def disturb(world: "World", kind: str) -> None:
    """Cause one of TROUBLES at a random peer."""
    TROUBLES[kind](world)


def kill(world: "World", machine: Machine) -> None:
    """Kill a machine (SIGKILL). Only messages that it has already sent may arrive."""
    machine.is_alive = False
    world.thaw(machine)
    for link in world.links.values():
        if link.sender is machine:
            for _ in range(world.rng.randint(0, len(link.queue))):
                link.queue.pop()
            link.is_broken = False
        elif link.receiver is machine:
            link.queue.clear()
    if world.rng.random() < 0.5:
        suspect(world, machine)
    if world.rng.random() < 0.7:
        world.notice((machine.me,))


def suspect(world: "World", machine: Machine) -> None:
    """Declare a machine dead, as SWIM does."""
    for other in _committing(world):
        assert other.committer is not None
        world.pass_on(other, other.committer.suspect(world.now, machine.me))


def _kill_replica(world: "World") -> None:
    for machine in _holding(world):
        kill(world, machine)


def _kill_committer(world: "World") -> None:
    for machine in world.alive(world.plan.trainers[:1]):
        kill(world, machine)


def _suspect(world: "World") -> None:
    for machine in _holding(world):
        suspect(world, machine)


def _freeze(world: "World") -> None:
    """Stop a machine for a while (SIGSTOP)."""
    alive = world.alive(world.plan.roster)
    if alive:
        machine = world.rng.choice(alive)
        machine.is_frozen = True
        machine.frozen_until = world.now + world.rng.choice((0.5, 5.0, 60.0))


def _join(world: "World") -> None:
    """Give a replica of a stage to a peer without one."""
    free = [each for each in world.alive(world.plan.roster) if world.plan.stage_of(each.me) is None]
    if free:
        stage = world.rng.randrange(len(world.plan.stages))
        row = Joining(world.rng.choice(free).me, stage, world.rng.choice((1, 2)))
        world.decide(Change(joined=(row,)))


def _rejoin(world: "World") -> None:
    for machine in _holding(world):
        world.rejoin(machine)


def _fail(world: "World") -> None:
    for machine in _holding(world):
        if machine.replica is not None:
            world.pass_on(machine, machine.replica.failed(GONE))


def _lose(world: "World") -> None:
    """Decide that a machine is dead although it lives."""
    for machine in _holding(world):
        world.notice((machine.me,))


def _save(world: "World") -> None:
    for machine in _committing(world):
        assert machine.committer is not None
        world.pass_on(machine, machine.committer.save(world.now))


def _pause(world: "World") -> None:
    for machine in _committing(world):
        assert machine.committer is not None
        world.pass_on(machine, machine.committer.pause(world.now))


def _lie(world: "World") -> None:
    """Have a machine report a wrong digest of its totals, once or for some time."""
    for machine in _holding(world):
        world.lied = True
        machine.wrong_digests += world.rng.choice((1, 1, 3))


def _corrupt(world: "World") -> None:
    """Have a machine end its next step with parameters different from its peers'."""
    for machine in _holding(world):
        machine.corrupts_next = True


def _spoil(world: "World") -> None:
    """Make a liar's frames unusable, a few times or from now on."""
    for machine in _liar(world):
        machine.spoils += world.rng.choice((1, 1, 3, 100))


def _accuse(world: "World") -> None:
    """Have a machine reject valid input as unusable."""
    for machine in _liar(world):
        machine.accuses += world.rng.choice((1, 1, 3, 100))


def _liar(world: "World") -> list[Machine]:
    """The only liar of a world, because two liars that collude cannot be detected. The committer, which
    judges, is never the liar.
    """
    if world.liar is None:
        world.liar = world.rng.choice(list(world.machines))
    machine = world.machines[world.liar]
    is_judge = any(machine.me == plan.committer for plan in world.plans)
    return [machine] if machine.is_alive and not is_judge else []


def _hang(world: "World") -> None:
    """Have a machine answer, but neither reduce nor apply any more."""
    for machine in _holding(world):
        machine.hangs = True


def _restore(world: "World") -> None:
    world.restore()


def _hand_over(world: "World") -> None:
    """Have other peers feed and commit from now on, even replicas."""
    others = [name for name in world.plan.roster if world.machines[PeerId(name)].is_alive]
    world.decide(Change(trainers=tuple(world.rng.sample(others, min(2, len(others))))))


def _break(world: "World") -> None:
    """Break a stream: messages in flight are lost, queued ones are not."""
    links = [
        link
        for link in world.links.values()
        if link.queue and not link.is_broken and link.sender is not link.receiver
    ]
    if not links:
        return
    link = world.rng.choice(links)
    link.is_broken = True
    messages = list(link.queue)
    lost = world.rng.randint(0, len(messages))
    again = [messages[lost - 1]] if lost and world.rng.random() < 0.3 else []
    link.queue = deque(again + messages[lost:])
    world.pool.add(link)


def reconnect(world: "World", sender: Machine, receiver: PeerId) -> None:
    """Open a broken stream again."""
    for core in (sender.committer, sender.feeder, sender.replica):
        if core is not None:
            sends: Sends = core.reconnected(receiver)
            world.pass_on(sender, sends)


def _holding(world: "World") -> list[Machine]:
    """A live peer with a stage, if there is any."""
    found = world.alive(tuple(name for stage in world.plan.stages for name in stage.replicas))
    return [world.rng.choice(found)] if found else []


def _committing(world: "World") -> list[Machine]:
    """The peers that believe they commit; there are two of them while a new plan spreads."""
    return [
        machine
        for machine in world.machines.values()
        if machine.committer is not None and machine.is_alive and not machine.is_frozen
    ]


TROUBLES: dict[str, Callable[["World"], None]] = {
    "kill": _kill_replica,
    "trainer": _kill_committer,
    "break": _break,
    "suspect": _suspect,
    "freeze": _freeze,
    "join": _join,
    "rejoin": _rejoin,
    "fail": _fail,
    "lose": _lose,
    "save": _save,
    "pause": _pause,
    "lie": _lie,
    "corrupt": _corrupt,
    "spoil": _spoil,
    "accuse": _accuse,
    "hang": _hang,
    "restore": _restore,
    "trainers": _hand_over,
}
DISTURBANCES = (*TROUBLES, "kill", "break", "suspect")
