"""The states of a run, and the causes of its transitions.

A state is one member's view; `RunChanged` events report it. Only the transitions in the table are possible;
any other would be a bug in this program.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from crypto.errors import LocalProtocolError
from partition.plan.plan import Plan

State = Literal[
    "submitted", "placing", "running", "degraded", "paused", "ending", "done", "failed", "stopped"
]
Cause = Literal[
    "leases wanted",
    "plan in force",
    "stage short of replicas",
    "quorum lost",
    "stage lost",
    "node restarted",
    "training over",
    "result kept",
    "no way on",
    "asked to stop",
]

CAUSE_OF: Mapping[str, Cause] = MappingProxyType(
    {"done": "result kept", "failed": "no way on", "stopped": "asked to stop"}
)
"""The cause that each outcome of a run stands for."""

_ENDS: Mapping[Cause, State] = {"no way on": "failed", "asked to stop": "stopped"}
_GOES_ON: Mapping[Cause, State] = {
    "plan in force": "running",
    "stage short of replicas": "degraded",
    "quorum lost": "paused",
    "stage lost": "paused",
    "training over": "ending",
    "result kept": "done",  # a member may learn only of the end
    **_ENDS,
}
NEXT: Mapping[State, Mapping[Cause, State]] = MappingProxyType(
    {
        "submitted": {
            "leases wanted": "placing",
            "plan in force": "running",
            "stage short of replicas": "degraded",  # for a member that joins later
            "node restarted": "paused",
            **_ENDS,
        },
        "placing": {"plan in force": "running", **_ENDS},
        "running": _GOES_ON,
        "degraded": _GOES_ON,
        "paused": _GOES_ON,
        "ending": {
            "result kept": "done",
            "plan in force": "running",
            "stage short of replicas": "degraded",
            "quorum lost": "paused",
            "stage lost": "paused",
            **_ENDS,
        },
        "done": {},
        "failed": {},
        "stopped": {},
    }
)
OVER: frozenset[State] = frozenset(state for state, leads in NEXT.items() if not leads)


def cause_of(plan: Plan, wanted: Sequence[int]) -> Cause:
    """Return the cause that a plan in force stands for. `wanted` is the number of replicas that each stage
    began with."""
    if len(plan.stages) != len(wanted):
        return "stage short of replicas" if len(plan.stages) < len(wanted) else "plan in force"
    short = any(len(stage.computing) < count for stage, count in zip(plan.stages, wanted, strict=True))
    return "stage short of replicas" if short else "plan in force"


def after(state: State, cause: Cause) -> State:
    """Return the state that `cause` leads to. Raises LocalProtocolError if the table has no such
    transition."""
    try:
        return NEXT[state][cause]
    except KeyError:
        raise LocalProtocolError(f"'{cause}' cannot happen to a run that is {state}") from None
