"""Events of services: stages that are held, and answers that are made."""

from crypto.identity import PeerId
from node.events import Event


class ServiceChanged(Event, frozen=True, kw_only=True):
    """This node holds a `stage` of a service: so many members answer for each of its stages (`ready`), of
    `wished`. Where it is not held any more (`is_held`), `detail` says why."""

    service: str
    name: str
    stage: int
    ready: tuple[int, ...] = ()
    wished: int = 0
    is_held: bool = True
    detail: str = ""


class GenerationMoved(Event, frozen=True, kw_only=True):
    """An answer here lost a provider and goes on over `route`; not `is_exact`: its text may differ."""

    service: str
    name: str
    reason: str
    route: tuple[PeerId, ...]
    is_exact: bool = True


class GenerationEnded(Event, frozen=True, kw_only=True):
    """An answer to this node is over. What was asked and answered is in no event."""

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
