"""Measures of services: the number of answers, their outcomes, and their pauses."""

from dataclasses import dataclass, field

from sim.events import AnswerEnded
from sim.measures.rows import Row, known, quantile
from sim.observers import Observation


@dataclass
class _Service:
    outcomes: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    moved: int = 0
    moves: int = 0
    firsts: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    """The longest pause of each answer that changed its route."""
    seconds: float = 0.0


class AnswerFigures:
    """Metrics, labelled with the service: `answer_seconds` and `answer_pause_seconds` of each answer."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows
        self._services: dict[bytes, _Service] = {}
        self.handlers = {AnswerEnded: self._ended}

    def summary(self) -> list[dict[str, object]]:
        return [self._of(name, each) for name, each in self._services.items()]

    def _of(self, name: bytes, service: _Service) -> dict[str, object]:
        firsts, pauses = sorted(service.firsts), sorted(service.pauses)
        return {
            "service": name.hex()[:8],
            "answers": sum(service.outcomes.values()),
            "outcomes": dict(sorted(service.outcomes.items())),
            "tokens": service.tokens,
            "moved": service.moved,
            "moves": service.moves,
            "first_seconds_p50": known(quantile(firsts, 0.5)),
            "first_seconds_p95": known(quantile(firsts, 0.95)),
            "pause_seconds_p50": known(quantile(pauses, 0.5)),
            "pause_seconds_p95": known(quantile(pauses, 0.95)),
            "tokens_per_second": known(service.tokens / service.seconds) if service.seconds else None,
        }

    def _ended(self, observed: Observation) -> None:
        event = observed.event
        service = self._services.setdefault(event.service, _Service())
        service.outcomes[event.outcome] = service.outcomes.get(event.outcome, 0) + 1
        service.tokens += event.tokens
        service.seconds += event.seconds
        service.moves += event.moves
        if event.tokens:
            service.firsts.append(event.first_seconds)
        if event.moves:
            service.moved += 1
            service.pauses.append(event.pause_seconds)
        label = event.service.hex()[:8]
        self._rows.append(Row(observed.time, "answer_seconds", label, event.seconds))
        self._rows.append(Row(observed.time, "answer_pause_seconds", label, event.pause_seconds))
