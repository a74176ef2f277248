"""A member acts when one of its waits ends, even without new messages."""

from partition.plan.change import Change, successor
from partition.plan.plan import committee
from partition.run.asks import Declined, HoldStage
from tests.partition.test_run_member import PLAN, SETTINGS, SPARE, TWO, Node, short_of_a_replica


def asks_next(node: Node, seconds: float) -> float | None:
    """Wake a member at its deadlines, as its drivers do, for this long. Return when it requests a slot."""
    end = node.now + seconds
    while node.core.deadline <= end:
        node.at(max(node.now, node.core.deadline))
        if any(isinstance(ask.request, HoldStage) for ask in node.asked()):
            return node.now
    return None


def test_a_refusing_provider_is_asked_again_without_new_messages() -> None:
    node, _ = short_of_a_replica()
    node.free = [(SPARE, 9)]
    (lease,) = node.asked()
    node.reply(lease, Declined("it does not know yet how the run went on"))
    node.asked()
    refused_at = node.now
    assert asks_next(node, 60.0) == refused_at + SETTINGS.busy_seconds_min


def test_a_free_place_is_filled_after_the_refill_delay() -> None:
    plan = successor(PLAN, Change(lost=(TWO,)))
    node = Node(committee(plan)[0]).begin()
    node.die(TWO)
    node.decided(Change(lost=(TWO,)))
    node.at(SETTINGS.refill_seconds - 3)
    node.free = [(SPARE, 9)]
    node.core.members_changed(node.now)
    assert asks_next(node, 60.0) == SETTINGS.refill_seconds
