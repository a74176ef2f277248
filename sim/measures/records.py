"""Measures of the DHT per window of time: whether lookups find stored records, how soon, and in how many
rounds."""

from sim.events import RecordGot, RecordWanted
from sim.measures.rows import Row, known, mean, quantile, quantiles
from sim.observers import Observation


class Records:
    """Metrics of each window in which any lookup or store ended: `lookups` and `stores` count those that
    ended; `lookups_found_share` is the share that succeeded of the lookups whose record existed;
    `lookup_seconds`, `lookup_rounds` and `store_seconds` have quantiles (`lookup_rounds` also the mean);
    `store_copies` is an average."""

    def __init__(self) -> None:
        self._lookups: list[RecordGot] = []
        self._stores: list[RecordGot] = []
        self._lookups_before = self._stores_before = 0
        self._lookups_begun = self._stores_begun = 0
        self.handlers = {RecordWanted: self._began, RecordGot: self._got}

    def sample(self, now: float, rows: list[Row]) -> None:
        """Close the window that began with the previous sample."""
        lookups = self._lookups[self._lookups_before :]
        stores = self._stores[self._stores_before :]
        self._lookups_before, self._stores_before = len(self._lookups), len(self._stores)
        if lookups:
            rows.append(Row(now, "lookups", "", len(lookups)))
            share = found_share(lookups)
            if share is not None:
                rows.append(Row(now, "lookups_found_share", "", share))
            rows += _by_quantile(now, "lookup_seconds", [lookup.seconds for lookup in lookups])
            rows += _by_quantile(now, "lookup_rounds", [lookup.rounds for lookup in lookups])
            rows.append(Row(now, "lookup_rounds", "mean", mean(lookup.rounds for lookup in lookups)))
        if stores:
            rows.append(Row(now, "stores", "", len(stores)))
            rows.append(Row(now, "store_copies", "", mean(store.copies for store in stores)))
            rows += _by_quantile(now, "store_seconds", [store.seconds for store in stores])

    def summary(self) -> dict[str, object]:
        return {
            "lookups": len(self._lookups),
            "lookups_expected": sum(lookup.expected for lookup in self._lookups),
            "lookups_found_share": found_share(self._lookups),
            "lookup_seconds": quantiles(lookup.seconds for lookup in self._lookups),
            "lookup_rounds": quantiles(lookup.rounds for lookup in self._lookups),
            "lookup_rounds_mean": known(mean(lookup.rounds for lookup in self._lookups)),
            "stores": len(self._stores),
            "store_seconds": quantiles(store.seconds for store in self._stores),
            "store_copies_mean": known(mean(store.copies for store in self._stores)),
            "lookups_without_end": self._lookups_begun - len(self._lookups),
            "stores_without_end": self._stores_begun - len(self._stores),
        }

    def _began(self, observed: Observation) -> None:
        self._stores_begun += observed.event.storing
        self._lookups_begun += not observed.event.storing

    def _got(self, observed: Observation) -> None:
        (self._stores if observed.event.storing else self._lookups).append(observed.event)


def found_share(lookups: list[RecordGot]) -> float | None:
    """Return the share of successful lookups among those whose record existed; None if there was no such
    lookup."""
    expected = [lookup for lookup in lookups if lookup.expected]
    return known(mean(lookup.copies > 0 for lookup in expected)) if expected else None


def _by_quantile(now: float, metric: str, values: list[float]) -> list[Row]:
    ordered = sorted(values)
    return [Row(now, metric, name, quantile(ordered, share)) for name, share in (("p50", 0.5), ("p95", 0.95))]
