"""A run on two branches: only a branch's own committer abandons it, judging by its own knowledge, and one
branch survives.

Whole nodes in virtual time receive hand-made reports that another branch has made more steps; `test_takeover`
really partitions a swarm. Below, the rule alone is tested, in any order of messages.
"""

from collections.abc import Callable
from random import Random

import trio
from hypothesis import given
from hypothesis import strategies as st

from node.events import RunChanged, StepCommitted
from partition.plan.paxos import ForkFound
from partition.plan.paxos_messages import ChainHead, other_branch_wins
from tests.partition_world import World
from tests.stack import Swarm
from tests.test_takeover import SAVE_EVERY, play, said, small

ELSEWHERE = bytes([1]) * 32


def tell(world: World, name: str, step: int) -> None:
    """Report to this member that another branch has committed this many steps."""
    node = world.group.nodes[name]
    member = node.runs.members[world.run.id]
    wanted = world.run.manifest
    samples = step * wanted.microbatches * wanted.microbatch
    head = ChainHead(run=world.run.id, parent=ELSEWHERE, height=1, step=step, samples=samples)
    member.core.on_chain(member._now, ForkFound(node.peer, head))
    member.act()


def committer(group: Swarm, world: World) -> str:
    plan = next(node.runs.members[world.run.id].plan for node in group.nodes.values())
    assert plan is not None
    return group.name_of(plan.committer)


def given_up(world: World) -> set[str]:
    """Return the nodes that reported giving up their branch."""
    return {
        name
        for name, events in world.group.events.items()
        for event in events
        if isinstance(event, RunChanged) and "another branch of the run goes on" in event.reason
    }


def told(whom: Callable[[str, World], list[str]], step: int, *, ends: bool = True) -> World:
    """Play a run of ten steps; after three steps, these members learn of a different branch."""

    async def scenario(world: World) -> None:
        await world.reached(SAVE_EVERY)
        names = whom(committer(world.group, world), world)
        for name in names:
            member = world.group.nodes[name].runs.members[world.run.id]
            member.core.progress.step = 0  # the member's reports are old
            tell(world, name, step)
        if not ends:
            await trio.sleep(5)

    return play("abcd", small(replicas=2, steps=10), scenario, ends=ends, forks=True)


def others(first: str, world: World) -> list[str]:
    return [name for name in world.group.nodes if name != first]


def test_members_stay_on_their_branch_while_its_committer_lives() -> None:
    world = told(others, 100)
    assert given_up(world) == set()


def test_a_committer_compares_branches_by_commits_not_by_announcements() -> None:
    world = told(lambda first, world: [first], SAVE_EVERY - 1)
    assert given_up(world) == set()


def test_an_abandoned_branch_commits_nothing_more() -> None:
    world = told(lambda first, world: [first], 100, ends=False)
    assert given_up(world) == set(world.group.nodes)
    parted = min(
        event.at for event in said(world, RunChanged) if "another branch of the run goes on" in event.reason
    )
    assert all(event.at <= parted for event in said(world, StepCommitted))


@given(st.integers(0, 2**32), st.tuples(st.integers(0, 1), st.integers(0, 1)))
def test_one_of_two_branches_survives_in_any_message_order(seed: int, behind: tuple[int, int]) -> None:
    """Each branch commits, makes new plans, and announces its progress; announcements may come late, or
    never."""
    rng = Random(seed)
    steps, plans = list(behind), [rng.randbytes(32), rng.randbytes(32)]
    forks = [rng.choice((bytes(32), rng.randbytes(32))), rng.randbytes(32)]
    sent: list[list[ChainHead]] = [[], []]
    gone = [False, False]

    def head(branch: int) -> ChainHead:
        return ChainHead(
            run=bytes(32),
            parent=plans[branch],
            fork=forks[branch],
            height=1,
            step=steps[branch],
            samples=steps[branch],
        )

    for _ in range(60):
        branch = rng.randrange(2)
        if gone[branch]:
            continue
        match rng.choice(("commit", "plan", "plan", "say", "say", "hear")):
            case "commit" if rng.random() < 0.1:
                steps[branch] += 1
            case "plan":
                plans[branch] = rng.randbytes(32)
            case "say":
                sent[branch].append(head(branch))
            case "hear" if sent[1 - branch]:
                gone[branch] = other_branch_wins(head(branch), rng.choice(sent[1 - branch]))
    # At the end each branch learns the other's true state.
    for branch in range(2):
        if not any(gone):
            gone[branch] = other_branch_wins(head(branch), head(1 - branch))
    assert gone.count(True) == 1
