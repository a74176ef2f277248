"""Events of services: stages that this node holds, and answers that it receives."""

from crypto.identity import PeerId
from node.events import Event


class ServiceChanged(Event, frozen=True, kw_only=True):
    """This node holds a `stage` of a service. If it no longer does (not `is_held`), `detail` says why.
    `ready` has for each stage how many members serve it; `wished` is the number wanted."""

    service: str
    name: str
    stage: int
    ready: tuple[int, ...] = ()
    wished: int = 0
    is_held: bool = True
    detail: str = ""


class GenerationMoved(Event, frozen=True, kw_only=True):
    """An answer to this node lost a provider and continues over `route`. If not `is_exact`, its text may
    differ from that without the loss."""

    service: str
    name: str
    reason: str
    route: tuple[PeerId, ...]
    is_exact: bool = True


class GenerationEnded(Event, frozen=True, kw_only=True):
    """An answer to this node has ended. No event contains the question or the answer."""

    service: str
    name: str
    outcome: str
    detail: str
    tokens: int
    moves: int
    first_seconds: float | None
    tokens_per_second: float | None
    route: tuple[PeerId, ...]
    prompt_tokens: int = 0
