"""Predicts the duration of a run's step without some of its peers, from the latest measured step.

Each stage's busy time is the sum over its replicas; without some of them the others share it in proportion to
their speed. The slowest stage determines the duration of a step, so the duration scales with the largest busy
share. Transfers and the bubble are assumed to scale in the same way, which holds while computing is the
bottleneck. No I/O.
"""

from collections.abc import Set
from typing import Any

from crypto.identity import PeerId
from node.state import RunView, State
from node.web.views import peer_key


def document(state: State, view: RunView, without: Set[str]) -> dict[str, Any]:
    """Return the prediction for `view` without the peers of these keys."""
    plan, step = view.plan, view.committed
    if plan is None:
        return {"error": "this run has no plan"}
    rows: list[dict[str, Any]] = []
    for number, (layers, peers) in enumerate(zip(plan.layers, plan.stages, strict=True)):
        left = [peer for peer in peers if peer_key(peer) not in without]
        busy = step.utilisation[number] if step is not None and number < len(step.utilisation) else None
        before, after = _speed(state, peers), _speed(state, left)
        then = busy * before / after if busy is not None and after > 0 else None
        rows.append(
            {
                "stage": number,
                "layers": list(layers),
                "replicas": [peer_key(peer) for peer in peers],
                "left": [peer_key(peer) for peer in left],
                "busy": busy,
                "busy_then": then,
            }
        )
    empty = [row["stage"] + 1 for row in rows if not row["left"]]
    seconds = step.seconds if step is not None and step.seconds > 0 else None
    shares = [(row["busy"], row["busy_then"]) for row in rows if row["busy_then"] is not None]
    slowest = max((now for now, _ in shares), default=0.0)
    slowest_then = max((then for _, then in shares), default=0.0)
    # A stage that is busy for longer than the whole step delays all others; below that it only waits less.
    stretch = max(1.0, slowest_then / slowest) if slowest > 0 else None
    predicted = seconds * stretch if seconds is not None and stretch is not None and not empty else None
    return {
        "schema": "peerloom/whatif/1",
        "run": view.run,
        "is_feasible": not empty,
        "step_seconds": seconds,
        "predicted_seconds": predicted,
        "rate_share": 1 / stretch if stretch is not None and not empty else None,
        "stages": rows,
        "text": _text(state, view, rows, empty, stretch, without),
    }


def _speed(state: State, peers: tuple[PeerId, ...] | list[PeerId]) -> float:
    """Return the sum of these peers' offered speeds. An unknown offer counts as the mean of the known
    ones."""
    known = [speed for peer in peers if (speed := _offer(state, peer)) > 0]
    mean = sum(known) / len(known) if known else 1.0
    return sum(_offer(state, peer) or mean for peer in peers)


def _offer(state: State, peer: PeerId) -> float:
    if state.started is not None and peer == state.started.peer:
        return state.capacity.flops_per_second if state.capacity is not None else 0.0
    member = state.members.get(peer)
    return member.capacity.flops_per_second if member is not None and member.capacity is not None else 0.0


def _text(
    state: State,
    view: RunView,
    rows: list[dict[str, Any]],
    empty: list[int],
    stretch: float | None,
    without: Set[str],
) -> str:
    if empty:
        spares = _spares(state, view, without)
        stages = ", ".join(map(str, empty))
        if not spares:
            return f"Stage {stages} would be without a replica, and no other member could take it."
        return (
            f"Stage {stages} would be without a replica. The run would return to its newest checkpoint on "
            f"one of {len(spares)} spare members."
        )
    if not without:
        return "Every peer stays. Choose some peers to leave out."
    if stretch is None:
        return "The run would continue. No step was measured yet, so its speed cannot be predicted."
    held = next((row for row in rows if len(row["left"]) < len(row["replicas"])), None)
    if stretch > 1 and held is not None:
        return f"The run would continue, but steps would take {stretch:.2f} times as long."
    return "The run would continue at about the same speed, because a different stage is the slowest."


def _spares(state: State, view: RunView, without: Set[str]) -> list[PeerId]:
    assert view.plan is not None
    taken = {peer for stage in view.plan.stages for peer in stage}
    return [
        member.peer
        for member in state.alive()
        if member.peer not in taken and peer_key(member.peer) not in without and member.capacity is not None
    ]
