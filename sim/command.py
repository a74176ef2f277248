"""A person's request to the simulator on the command line, so that it can be played, swept and repeated."""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from node.errors import UsageError


@dataclass(frozen=True)
class ExperimentRequest:
    """A person's request. `scenario` and `settings` are kept as typed, so that the command can be
    repeated."""

    program: str
    scenario: str
    settings: tuple[str, ...]
    seed: int
    out: str
    events_max: int | None
    plots: bool
    as_json: bool
    quiet: bool

    def values(self) -> dict[str, str]:
        return assignments("--set", self.settings)

    def words(self, values: Iterable[tuple[str, str]] = (), seed: int | None = None) -> list[str]:
        """Return the command-line arguments that play this request, with additional values and a different
        seed if given."""
        words = [self.scenario, "--seed", str(self.seed if seed is None else seed)]
        for setting in (*self.settings, *(f"{key}={value}" for key, value in values)):
            words += ["--set", setting]
        return words

    def command(self, values: Iterable[tuple[str, str]] = (), seed: int | None = None) -> str:
        """Return the command that plays this request, as a person types it."""
        return f"{self.program} {shlex.join(self.words(values, seed))}"


def assignments(flag: str, texts: Sequence[str]) -> dict[str, str]:
    """Parse `KEY=VALUE` in each text; if a key is repeated, its last value counts. Raises UsageError."""
    values = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key.strip() and equals):
            raise UsageError(f"{flag} {text}: expected KEY=VALUE, such as nodes=300")
        values[key.strip()] = value.strip()
    return values
