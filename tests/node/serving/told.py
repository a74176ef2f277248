"""Sample events of services, at least one of each kind."""

from crypto.identity import PeerId
from node import events
from node.serving_events import GenerationEnded, GenerationMoved, ServiceChanged


def serving_events(at: float, first: PeerId, second: PeerId) -> list[events.Event]:
    """Return the events of a service that is held, an answer that moves and ends, and a stage that is
    released."""
    return [
        ServiceChanged(at=at, service="ab" * 8, name="gpt", stage=1, ready=(2, 1), wished=2),
        GenerationMoved(
            at=at,
            service="ab" * 8,
            name="gpt",
            reason="its stream broke",
            route=(first, second),
            is_exact=False,
        ),
        GenerationEnded(
            at=at,
            service="ab" * 8,
            name="gpt",
            outcome="length",
            detail="",
            tokens=40,
            moves=1,
            first_seconds=0.25,
            tokens_per_second=12.34,
            route=(first, second),
            prompt_tokens=7,
        ),
        ServiceChanged(at=at, service="ab", name="gpt", stage=1, is_held=False, detail="it leaves"),
    ]


def page_opened(at: float) -> events.Event:
    """Return the event of a page opened on this machine, with models served beyond it."""
    address, models = "http://127.0.0.1:40500", "https://192.168.1.20:9748"
    return events.PageOpened(at=at, address=address, port_wanted=9748, models=models)
