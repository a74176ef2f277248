"""A stage is replaced by machines of the same kind, because they most likely compute the same bits."""

import pytest
from msgspec.structs import replace

from node.cli.serve import service_lines
from node.serving.asking import Asking
from partition.plan.observed import Knowledge
from partition.plan.rates import REFERENCE
from tests.node.serving.scene import holders, serving, until
from tests.stack import simulate

NAMES = "abcd"


@pytest.mark.parametrize("alike", range(2))
def test_a_spare_node_of_the_same_machine_kind_is_preferred(alike: int) -> None:
    async def main() -> None:
        async with serving(NAMES) as (group, service):
            first = holders(group)
            free = [name for name in NAMES if name not in first]
            kinds = dict.fromkeys(NAMES, "one processor") | {free[1 - alike]: "another"}
            rows = {group.nodes[name].peer: replace(REFERENCE, hardware=kinds[name]) for name in NAMES}
            for node in group.nodes.values():
                node.serving.knowledge = lambda: Knowledge(calibrations=rows)
            victim = next(name for name in first if name != "a")
            group.kill(victim)
            await until(lambda: len(holders(group)) == 2)
            assert holders(group)[free[alike]] == first[victim]
            assert service.manifest.stages == 2

    simulate(main)


def test_the_service_listing_warns_of_replicas_in_several_bit_classes() -> None:
    async def main() -> None:
        async with serving(NAMES, replicas=2) as (group, service):
            await until(lambda: len(holders(group)) == 4)
            node = group.nodes["a"]
            await node.serving.published.await_ready(service)

            async def lines() -> list[str]:
                return service_lines(await Asking(node.serving).document(service), {})

            assert not any("bit classes" in line for line in await lines())
            (member,) = node.serving.hosting.of(service.id)
            assert member.stage is not None
            member.stage.bits = b"y"
            (told,) = [line for line in await lines() if "bit classes" in line]
            assert told.startswith(f"  stage {member.number + 1} has replicas of 2 bit classes")

    simulate(main)
