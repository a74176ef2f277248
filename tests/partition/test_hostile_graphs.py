"""Hundreds of hostile graphs: each is refused with a reason, or runs to its end.

Every case goes to a separate process (`tests.partition.hostile_stage`), which does what a node and a stage's
process do with a graph, and computes the graph for real if it was admitted. The test fails, and prints the
seed, on a signal, a hang, an exception other than a refusal, or a process that grows. `make soak` runs 10,000
cases.
"""

import io
import os
import pickle
import re
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crypto.errors import RemoteProtocolError
from partition.model.check import check_graph
from partition.model.graph import Constant, TensorType, decode_graph, encode_graph
from tests.partition.half_graphs import half_graph
from tests.partition.hand_models import gpt_graph
from tests.partition.hostile import Died, HostileProcess, form_case, mutated_case, operator_case
from tests.partition.hostile_stage import Case, Outcome
from tests.partition.test_check import GOOD
from tests.source import PACKAGES, sources

CASES = int(os.environ.get("PEERLOOM_HOSTILE_CASES", "180"))
REFUSED_SECONDS_MAX = 5.0
"""Time limit for a refusal: usually some milliseconds, and up to a second when torch loads libraries for the
first time."""
RSS_BYTES_MAX = 1_500_000_000
"""Memory limit; torch itself uses a third of it."""
ENDED_MAX = 0.005
"""Maximum share of the cases that ran whose backward pass may raise for a reason that no dry run shows."""

MODELS = [GOOD, gpt_graph(16, 8, 8, 2, 1, 0.1), half_graph()]
KINDS: dict[str, Callable[[int], Case]] = {
    "operators": operator_case,
    "forms": form_case,
    "graphs": lambda seed: mutated_case(seed, MODELS),
}


class Tally:
    """One process for all cases, and the outcomes of the cases."""

    def __init__(self) -> None:
        self.process = HostileProcess()
        self.verdicts: Counter[str] = Counter()
        self.slowest_refusal_seconds = self.slowest_run_seconds = 0.0
        self.peak_rss_bytes = 0
        self.ended: list[str] = []

    def ask(self, case: Case) -> Outcome:
        try:
            outcome = self.process.ask(case)
        except Died:
            self.process = HostileProcess()
            raise
        self.verdicts[outcome.verdict] += 1
        self.peak_rss_bytes = max(self.peak_rss_bytes, outcome.peak_rss_bytes)
        if outcome.verdict == "refused":
            self.slowest_refusal_seconds = max(self.slowest_refusal_seconds, outcome.seconds)
        else:
            self.slowest_run_seconds = max(self.slowest_run_seconds, outcome.seconds)
        if outcome.verdict == "ended":
            operators = case.stage.operators[:3] if case.stage else ()
            self.ended.append(f"{outcome.reason}, of {', '.join(operators) or 'a graph'}")
        return outcome

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(self.verdicts.items()))
        return (
            f"{self.verdicts.total()} cases: {counts}; slowest refusal {self.slowest_refusal_seconds:.2f} s, "
            f"slowest run {self.slowest_run_seconds:.2f} s, peak RSS {self.peak_rss_bytes / 1e6:.0f} MB"
        )


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    found = Tally()
    yield found
    found.process.close()


@pytest.mark.parametrize("kind", KINDS)
@settings(
    max_examples=CASES // len(KINDS),
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(seed=st.integers(0, 2**48))
def test_a_hostile_graph_is_refused_or_runs_to_its_end(kind: str, seed: int, tally: Tally) -> None:
    outcome = tally.ask(KINDS[kind](seed))
    assert outcome.verdict in ("refused", "stopped", "ended", "ran")
    assert outcome.reason or outcome.verdict == "ran"
    assert outcome.peak_rss_bytes < RSS_BYTES_MAX
    if outcome.verdict == "refused":
        assert outcome.seconds < REFUSED_SECONDS_MAX


def test_a_few_hostile_graphs_are_admitted_and_most_are_refused(tally: Tally) -> None:
    sys.stdout.write("\n  ended: ".join([f"\n{tally}", *sorted(set(tally.ended))]) + "\n")
    assert tally.verdicts.total() >= CASES * 0.9
    assert tally.verdicts["ran"] > 0.1 * CASES
    assert tally.verdicts["refused"] > 0.3 * CASES
    assert tally.verdicts["ended"] <= ENDED_MAX * CASES


def test_a_valid_graph_runs_to_its_end(tally: Tally) -> None:
    for model in MODELS:
        outcomes = [tally.ask(Case(encode_graph(model), None, draw)) for draw in range(12)]
        assert "ran" in {outcome.verdict for outcome in outcomes}
        # The labels of the other models are not classes.
        assert all(outcome.verdict in ("ran", "stopped") for outcome in outcomes)


# Three files that ran code when `torch.export` loaded them


class Payload:
    """An object that runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self._command,)


class Small(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.fixture(scope="module")
def exported() -> dict[str, bytes]:
    """Return the members of a real archive of `torch.export`."""
    program = torch.export.export(
        Small(), (torch.ones(3, 2),), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},)
    )
    archive = io.BytesIO()
    torch.export.save(program, archive)
    with zipfile.ZipFile(archive) as members:
        return {name: members.read(name) for name in members.namelist()}


def archive_of(members: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return made.getvalue()


def poisoned(members: dict[str, bytes], sentinel: Path) -> dict[str, bytes]:
    """Return the archive as a hostile peer would send it, in each of the three ways."""
    command = f"touch {sentinel}"
    (model,) = [name for name in members if name.endswith("model.json")]
    text = members[model].decode()
    inputs = [name for name in members if "sample_inputs" in name and name.endswith(".pt")]
    code = f"__import__('os').system('{command}')"
    assert "s" in text
    assert '"x"' in text
    pickled = dict(members)
    for name in inputs or ["archive/data/sample_inputs/model.pt"]:
        pickled[name] = pickle.dumps(Payload(command))
    expression, changed = re.subn(r'("expr_str": ")[^"]*(")', rf"\1{code}\2", text)
    assert changed
    placeholder = text.replace('"x"', f'"x=0):\\n    {code}\\n    return (x,)\\ndef f(y"')
    return {
        "a pickle": archive_of(pickled),
        "an expression": archive_of({**members, model: expression.encode()}),
        "a placeholder": archive_of({**members, model: placeholder.encode()}),
    }


@pytest.mark.parametrize("way", ["a pickle", "an expression", "a placeholder"])
def test_a_pickled_file_is_refused_and_runs_no_code(
    way: str, exported: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentinel = tmp_path / "ran"
    data = poisoned(exported, sentinel)[way]

    def loaded(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was loaded")

    for name in ("torch.load", "torch.export.load", "torch.jit.load", "pickle.loads", "pickle.load"):
        monkeypatch.setattr(name, loaded)
    for wrapped in (data, b"\x9d" + data, b"\xc6" + len(data).to_bytes(4, "big") + data):
        with pytest.raises(RemoteProtocolError, match="not a valid message"):
            decode_graph(wrapped)
    assert not sentinel.exists()


def test_a_pickle_in_place_of_a_constant_stays_bytes(tmp_path: Path) -> None:
    sentinel = tmp_path / "ran"
    harm = pickle.dumps(Payload(f"touch {sentinel}"))
    harmless = Constant((), TensorType("uint8", (len(harm),)), harm)
    graph = msgspec.structs.replace(GOOD, constants=(*GOOD.constants, harmless))
    check_graph(decode_graph(encode_graph(graph)))
    assert not sentinel.exists()


def test_no_code_of_ours_loads_torch_exports() -> None:
    loading = re.compile(r"\b(torch|export|jit|pickle)\.loads?\(|torch\.export\.load|weights_only")
    assert [source.place for source in sources(*PACKAGES) if loading.search(source.text)] == []
