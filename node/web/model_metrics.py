"""Metrics of the models that this node was asked for, for `/metrics`.

A model's label is its service's name. The first MODELS_MAX names have their own label; all others share
"other".
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from node.protocols.services import Listing, Service
from node.serving_events import GenerationEnded

MODELS_MAX = 32
"""Maximum number of labels. More lines make a dashboard unreadable, and each histogram has a dozen series for
each model."""
OTHER = "other"
FIRST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
BETWEEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
QUEUE_BUCKETS = (0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 120.0)
OUTCOMES = ("stop", "length", "cancelled", "failed")
"""The ways in which an answer of a model can end."""


class ModelMetrics:
    """Counts answers as they come and end."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._outcomes: Counter[tuple[str, str]] = Counter()
        self._sums: Counter[tuple[str, str]] = Counter()
        labels = ("model",)
        self._first = Histogram(
            "peerloom_answer_first_token_seconds",
            "Time from an answer's beginning at this node to its first token, without the time in the "
            "queue. Answers without a token are not counted.",
            labels,
            buckets=FIRST_BUCKETS,
            registry=None,
        )
        self._between = Histogram(
            "peerloom_answer_between_tokens_seconds",
            "Time between the tokens of an answer as they reach this node, including failovers, but without "
            "a client's waiting for its connection.",
            labels,
            buckets=BETWEEN_BUCKETS,
            registry=None,
        )
        self._queue = Histogram(
            "peerloom_answer_queue_seconds",
            "Time that a request over HTTP waited in the queue. Requests that were refused are not counted.",
            labels,
            buckets=QUEUE_BUCKETS,
            registry=None,
        )

    @property
    def histograms(self) -> Sequence[Histogram]:
        return self._first, self._between, self._queue

    def ended(self, event: GenerationEnded) -> None:
        """Count an answer that is over."""
        model = self._label(event.name)
        self._outcomes[model, event.outcome] += 1
        self._sums[model, "made"] += event.tokens
        self._sums[model, "read"] += event.prompt_tokens
        self._sums[model, "moves"] += event.moves
        if event.first_seconds is not None:
            self._first.labels(model).observe(event.first_seconds)

    def between(self, name: str, seconds: float) -> None:
        """Count the time between two tokens of an answer."""
        self._between.labels(self._label(name)).observe(seconds)

    def queued(self, name: str, seconds: float) -> None:
        """Count the time that a request waited in the queue."""
        # A name without a service is a client's mistake, so it gets no label of its own.
        self._queue.labels(name if name in self._names else OTHER).observe(seconds)

    def families(self, held: Iterable[tuple[Service, Listing]]) -> Iterator[Metric]:
        """Return the counters, and the present contents of the stages that are held here."""
        ended = CounterMetricFamily(
            "peerloom_answers",
            "Answers of models that this node was asked for, by how they ended.",
            labels=["model", "outcome"],
        )
        for model in self._names:
            for outcome in OUTCOMES:
                ended.add_metric([model, outcome], self._outcomes[model, outcome])
        yield ended
        for name, what, text in (
            ("answer_tokens", "made", "Tokens of these answers. Prompts are not counted."),
            (
                "answer_prompt_tokens",
                "read",
                "Tokens of their prompts, counted each time that they were asked.",
            ),
            ("answer_moves", "moves", "Times that an answer lost a provider and continued."),
        ):
            family = CounterMetricFamily(f"peerloom_{name}", text, labels=["model"])
            for model in self._names:
                family.add_metric([model], self._sums[model, what])
            yield family
        yield from self._held(held)

    def _held(self, held: Iterable[tuple[Service, Listing]]) -> Iterator[Metric]:
        families = [
            GaugeMetricFamily(f"peerloom_{name}", text, labels=["model"])
            for name, text in (
                ("model_sessions", "Sessions that are open at the stages of a model held here."),
                ("model_cache_tokens", "Tokens whose keys and values these stages keep."),
                ("model_cache_tokens_max", "Tokens for whose keys and values these stages have room."),
            )
        ]
        sums: Counter[tuple[str, int]] = Counter()
        known: set[bytes] = set()
        for service, listing in held:
            model = self._label(service.manifest.name)
            # A session has keys and values in each stage held here, but counts once.
            sessions = 0 if service.id in known else listing.sessions
            known.add(service.id)
            for row, count in enumerate((sessions, listing.tokens, listing.tokens_max)):
                sums[model, row] += count
        for row, family in enumerate(families):
            for model in dict.fromkeys(name for name, _ in sums):
                family.add_metric([model], sums[model, row])
            yield family

    def _label(self, name: str) -> str:
        if name not in self._names:
            if len(self._names) >= MODELS_MAX:
                return OTHER
            self._names[name] = None
        return name
