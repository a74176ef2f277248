"""The play behind docs/cloudmesh.md: real nodes, the commands that a person types, and what they print.

`Play` holds the nodes and runs commands. A `Row` names a function of the owner's report as far as its number
is known, what is typed here, and the tests that show it; `shown` keeps what a command printed in the play, by
the row's key. `page` makes the document of both. `tests.test_cloudmesh` plays.
"""

import json
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import Any

from node.cli.demo.processes import SwarmProcesses
from tests.installed import console_script
from tests.installed import environment as environment_of
from tests.source import ROOT

PAGE = ROOT / "docs" / "cloudmesh.md"
COMMAND_SECONDS_MAX = 300.0
LINES_MAX = 9
"""Of what a command prints, in the page."""
NAMES = "abc"


@dataclass
class Play:
    """Nodes below `folder`, what was typed at which, and what it printed."""

    folder: Path
    swarm: SwarmProcesses = field(init=False)
    script: Path = field(init=False)
    pause: Callable[[float], None] = time.sleep
    shown: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.script = console_script(self.folder / "bin")
        self.swarm = SwarmProcesses(self.folder, "cloudmesh", self.pause)

    def start(self) -> None:
        """Start the nodes, and wait until they know each other."""
        self.swarm.launch(NAMES)
        first = self.swarm.start(NAMES[0], None)
        for name in NAMES[1:]:
            self.swarm.start(name, first.address)
        self.wait(lambda: all(self.swarm.status(name)["members_alive"] == len(NAMES) - 1 for name in NAMES))

    def wait(self, ready: Callable[[], bool], seconds: float = COMMAND_SECONDS_MAX) -> None:
        """Wait until it is so."""
        until = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < until, "it did not come to that"
            self.pause(0.2)

    def begin(self, node: str, *words: str) -> "subprocess.Popen[str]":
        """Type `peerloom WORDS` at a node."""
        environment = environment_of(self.folder, [self.script.parent], COLUMNS="110")
        return subprocess.Popen(
            ["peerloom", *words, "--data-dir", str(self.swarm.nodes[node].data_dir)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=self.folder,
        )

    def end(self, process: "subprocess.Popen[str]", *, code: int | None = 0) -> str:
        """Return what a command printed, once it has ended with this code; None: with any but 0."""
        try:
            said, _ = process.communicate(timeout=COMMAND_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
            raise AssertionError(f"it did not end: {said[-2000:]}") from None
        is_wanted = process.returncode != 0 if code is None else process.returncode == code
        assert is_wanted, f"{process.args!r}: {process.returncode}\n{said[-2000:]}"
        return said

    def type(self, node: str, *words: str, code: int | None = 0) -> str:
        """Type a command, and return what it prints."""
        return self.end(self.begin(node, *words), code=code)

    def ask(self, node: str, *words: str) -> dict[str, Any]:
        """Return the JSON document that a command prints."""
        found: dict[str, Any] = json.loads(self.type(node, *words, "--json").splitlines()[-1])
        return found

    def show(self, key: str, said: str, *wanted: str) -> None:
        """Keep the lines of what was printed that match one of `wanted`, each of which one must match; all
        without any."""
        lines = [self._plain(line) for line in said.splitlines() if line.strip()]
        for each in wanted:
            assert any(re.search(each, line) for line in lines), (
                f"{key}: no line like {each}:\n{said[-3000:]}"
            )
        if wanted:
            lines = [line for line in lines if any(re.search(each, line) for each in wanted)]
        self.shown.setdefault(key, []).extend(lines[:LINES_MAX])

    def _plain(self, line: str) -> str:
        """A line without what is of this play alone."""
        return line.replace(str(self.folder), "/data").rstrip()[:160]

    def write(self, name: str, text: str) -> str:
        """A file in the folder where commands are typed."""
        (self.folder / name).write_text(text)
        return name

    def close(self) -> None:
        self.swarm.close()


@dataclass(frozen=True)
class Row:
    """One function: `numbers` are the report's, as far as this project knows them; `scenarios` say what
    happens here by their kind. `tests` are FILE::NAME."""

    key: str
    numbers: str
    title: str
    typed: Sequence[str]
    scenarios: Mapping[str, str]
    tests: Sequence[str]


TYPICAL, EXCEPTIONAL, ALTERNATIVE = "typical", "exceptional", "alternative"
PLAY = "tests/test_cloudmesh.py::test_a_part_of_the_play_of_three_real_nodes"

ROWS = (
    Row(
        "place", "4.3, 4.17", "Where a machine is",
        ("peerloom --location eu-west", "peerloom config set location eu-west"),
        {
            TYPICAL: "a person says where it stands; `[plan] place` and `near` of a run keep it there",
            EXCEPTIONAL: "a wrong location is doubted by measured round trips, and the nearer one counts",
            ALTERNATIVE: "`near` without a location: by round trips alone. No cluster has a head",
        },
        (
            PLAY,
            "tests/node/test_places.py::"
            "test_a_swarm_finds_a_wrong_location_by_latency_and_places_no_stage_there",
        ),
    ),
    Row(
        "parts", "4.4", "Training, validation and test data",
        ("peerloom train RUN.toml      # [splits] test = \"none.csv\"",),
        {
            TYPICAL: "`[splits]` names a source or a share for validation and test",
            EXCEPTIONAL: "a part that is missing is said before anything starts",
            ALTERNATIVE: "a fifth is held out where nothing is said",
        },
        (
            PLAY,
            "tests/node/test_bad_data.py::test_a_split_that_cannot_be_had_is_said",
            "tests/test_validation.py::test_a_run_is_validated_between_steps_and_its_steps_stay_as_they_were",
        ),
    ),
    Row(
        "devices", "4.10, 4.11, 4.14, 4.21 (one of these)", "The order of devices: GPU, MPS, CPU",
        ("peerloom train RUN.toml --devices cuda,mps,cpu",),
        {
            TYPICAL: "stages are on peers with the first kind where they are enough",
            EXCEPTIONAL: "too few with a GPU: placed on the next kind, and said",
            ALTERNATIVE: "only `--devices cuda`: not placed, with the reason",
        },
        (
            PLAY,
            "tests/node/test_places.py::test_devices_are_tried_in_their_order_and_what_comes_of_it_is_said",
        ),
    ),
    Row(
        "count", "4.10, 4.11, 4.14, 4.21 (one of these)", "The number of peers that is wanted",
        ("peerloom train digits.toml      # 2 stages x 2 replicas, three nodes",),
        {
            TYPICAL: "`[plan] stages` and `replicas`, or 0 for what is fastest",
            EXCEPTIONAL: "fewer are there: the run is made smaller, and says so",
            ALTERNATIVE: "`--wait 10m` waits for more first",
        },
        (PLAY, "tests/node/test_placement.py::test_a_smaller_shape_needs_no_more_peers_than_there_are",
            "tests/test_runs_end.py::test_a_run_waits_for_the_peers_that_it_lacks_where_it_is_told_to"),
    ),
    Row(
        "race", "4.10, 4.11, 4.14, 4.21 (one of these)", "Many who ask for one provider at once",
        ("peerloom train RUN.toml --wait 5m      # ten at once, three slots",),
        {
            TYPICAL: "each slot goes to one; the others are told busy and try others",
            EXCEPTIONAL: "all are busy: the run fails at once with the estimate, or waits with `--wait`",
            ALTERNATIVE: "of one's own runs a higher `[plan] priority` goes first, and what it preempts "
                         "loses nothing",
        },
        (
            PLAY,
            "tests/node/test_slots.py::test_of_two_requesters_that_race_for_one_provider_one_gets_it",
            "tests/node/test_turns.py::test_of_a_hundred_submissions_to_twenty_nodes_each_has_its_turn",
        ),
    ),
    Row(
        "result", "4.10, 4.11, 4.14, 4.21 (one of these)", "The requester leaves, and has the result later",
        ("peerloom train RUN.toml --detach", "peerloom leave",
         "peerloom runs fetch RUN --out FILE"),
        {
            TYPICAL: "the members finish it; each keeps the result",
            EXCEPTIONAL: "the requester is killed: `trainers` more than one go on",
            ALTERNATIVE: "any node of the swarm fetches it, days later",
        },
        (
            PLAY,
            "tests/test_requester_restarts.py::test_a_requester_that_was_restarted_hears_how_its_run_ended",
        ),
    ),
    Row(
        "rules", "4.18, 4.19, 4.21 (one of these)", "What a provider gives, and to whom",
        ("peerloom config set accept_runs never", "peerloom config set hours 22:00-07:00"),
        {
            TYPICAL: "memory, cores, disk, bandwidth, hours, idle, mains, slots, device, whom: at the start "
                     "or while it runs",
            EXCEPTIONAL: "the owner comes back: its stages are handed over within ten seconds",
            ALTERNATIVE: "`listed` peers, `invited` runs, or `never`",
        },
        (
            PLAY,
            "tests/node/test_permission.py::"
            "test_an_owner_that_comes_back_has_the_slot_within_ten_seconds_and_nothing_is_lost",
            "tests/node/test_limits.py::"
            "test_every_rule_of_an_owner_is_a_setting_of_the_file_and_changes_at_run_time",
        ),
    ),
    Row(
        "device", "4.20", "A wrong declaration",
        ("peerloom --device cuda:7", "peerloom config set device cuda:7"),
        {
            TYPICAL: "what is declared is there",
            EXCEPTIONAL: "no such GPU, or less memory: found at the start, corrected, the CPU computes, and "
                         "a line says so",
            ALTERNATIVE: "`auto` takes the first GPU that works",
        },
        (PLAY, "tests/node/test_limits.py::"
            "test_a_wrong_declaration_is_found_at_the_start_corrected_and_said"),
    ),
    Row(
        "watch", "not quoted", "Watching training",
        ("peerloom runs list", "peerloom runs show RUN", "peerloom runs metrics RUN --csv"),
        {
            TYPICAL: "loss, metrics by name, samples and tokens a second, time left, on every member",
            EXCEPTIONAL: "a learning rate that diverges stops the run with the step",
            ALTERNATIVE: "`[train] on_divergence = \"continue\"`; validation, early end, best state",
        },
        (PLAY, "tests/test_runs_end.py::test_a_run_that_diverges_ends_with_its_last_good_checkpoint"),
    ),
    Row(
        "steer", "not quoted", "Pause, resume, change, stop",
        ("peerloom runs pause RUN", "peerloom runs resume RUN",
         "peerloom runs revise RUN --learning-rate 0.0005", "peerloom runs stop RUN"),
        {
            TYPICAL: "from the next step on, on all members alike, signed by the requester",
            EXCEPTIONAL: "another's run cannot be stopped; `runs drop` leaves it",
            ALTERNATIVE: "the same from a program: `run.pause()`",
        },
        (PLAY, "tests/test_revisions.py::"
            "test_a_revised_learning_rate_is_the_same_on_all_replicas_though_the_committer_dies",
            "tests/test_runs_end.py::test_only_the_requester_may_stop_a_run"),
    ),
    Row(
        "data", "not quoted", "Data of many kinds, which travels by itself",
        ("peerloom train RUN.toml      # data = \"table.csv\"",),
        {
            TYPICAL: "a table, arrays, images, text or a URL of these; shards by hash go from peer to "
                     "peer, and each trainer takes those it is dealt",
            EXCEPTIONAL: "a cell that is no number is named, with its column, before anyone computes",
            ALTERNATIVE: "the requester may be gone once it has handed out a copy: others share theirs",
        },
        (
            PLAY,
            "tests/node/test_sources.py::test_a_table_that_does_not_do_says_where",
            "tests/node/test_bad_data.py::test_a_bad_file_is_one_error_with_its_name",
            "tests/node/test_data_files.py::test_a_trainer_takes_the_shards_it_is_dealt_and_the_next",
            "tests/gossip/test_pieces.py::test_a_swarm_is_four_times_as_quick_as_its_source_alone",
        ),
    ),
    Row(
        "validate", "not quoted", "Validation, an early end, the best state",
        ("peerloom train RUN.toml      # [train] validate_every, patience, keep = \"best\"",),
        {
            TYPICAL: "every so many steps on samples of its own, told beside the steps",
            EXCEPTIONAL: "no better for `patience` validations: the run ends",
            ALTERNATIVE: "`keep = \"best\"`: the result is the state that validated best, not the last",
        },
        (
            PLAY,
            "tests/test_validation.py::test_a_run_stops_early_at_the_same_step_though_its_committer_dies",
            "tests/test_validation.py::test_the_result_is_the_state_that_validated_best",
        ),
    ),
    Row(
        "predict", "not quoted", "Predictions on new samples",
        ("peerloom predict RUN.toml --run RUN --out outputs.csv --picture confusion.svg",),
        {
            TYPICAL: "outputs, metrics by name and a confusion matrix, as a file and a picture",
            EXCEPTIONAL: "weights of another model are refused",
            ALTERNATIVE: "samples without labels: outputs alone, and a line that says so",
        },
        (
            PLAY,
            "tests/test_predict.py::test_outputs_are_those_of_the_model_and_are_compared_with_the_truth",
            "tests/test_predict.py::test_what_cannot_be_predicted_is_said",
        ),
    ),
    Row(
        "shares", "not quoted", "Shares by what each has given",
        ("peerloom receipts", "peerloom train RUN.toml      # [plan] priority, deadline_minutes"),
        {
            TYPICAL: "of requesters that always want more, each gets slots in proportion to what it gave, by "
                     "receipts that both sides have signed",
            EXCEPTIONAL: "a receipt for a run that was never here is not signed",
            ALTERNATIVE: "a higher priority goes first of one's own runs, and counts beside nobody else's",
        },
        (
            PLAY,
            "tests/node/test_turns.py::test_requesters_that_always_want_more_get_shares_by_their_weights",
            "tests/node/test_receipts.py::test_a_receipt_for_a_run_that_was_never_here_is_not_signed",
        ),
    ),
    Row(
        "federated", "not quoted", "Data that stays with its owner",
        ("peerloom config set own_data scans=/data/scans",
         "peerloom train RUN.toml      # federated = true"),
        {
            TYPICAL: "each trains on its own set of that name; only models are averaged",
            EXCEPTIONAL: "refused in exact mode, where samples would travel",
            ALTERNATIVE: "a node without such a set takes no part",
        },
        (
            PLAY,
            "tests/node/local/test_federated.py::"
            "test_each_trains_on_its_own_set_and_no_byte_of_one_is_sent_or_kept",
        ),
    ),
)  # fmt: skip

KNOWN = ("4.3", "4.4", "4.10", "4.11", "4.14", "4.17", "4.18", "4.19", "4.20", "4.21")
"""The numbers that this project's plans quote, with a word on what they are about."""


PAGE_WIDTH = 118
MADE = (
    "Made by a test run on three real nodes, do not edit: `PEERLOOM_DOCS=write python -m pytest -n0 "
    "tests/test_cloudmesh.py`. What is indented under *shows* was printed by the commands in that run, "
    "where the same lines are asserted."
)
KNOWLEDGE = (
    "The report's section 4 has 22 functions (4.1 to 4.22), its section 3 eight exceptions and eight "
    "variations. **Its text is not in this project.** Known are the numbers that the project's plan "
    "quotes, most of them in groups: a row then names the group. Rows without a number are functions "
    "that the plan asks for by name. Its experiment is known too: SimpleCNN on CIFAR-10, ten epochs, 74.52 % "
    "in 10.3 minutes on one machine, 73.70 % in 8.8 on two; docs/headline.md repeats it on data that can be "
    "had here. Of {} and of the sixteen exceptions and variations nothing is "
    "known here but how many there are: no row claims to be one of them."
)
DEFAULTS = (
    "The report trains with batches of 16 and a learning rate of 0.001. Here `train.learning_rate` is "
    "0.001 too. `train.batch` is 128: a step of 16 samples is one micro-batch, which keeps all stages "
    "but one idle. A value that is wrong is refused with its line, and never replaced; what is chosen "
    '(`"auto"`), reduced or corrected is said.'
)


def unknown() -> list[str]:
    """The numbers of which nothing is known here."""
    return [number for number in (f"4.{each}" for each in range(1, 23)) if number not in KNOWN]


def shown_in(text: str) -> dict[str, list[str]]:
    """What commands printed, by the rows' keys, of the page as it is."""
    found = {}
    for row in ROWS:
        part = text.partition(f"## {row.title} (")[2].partition("\n## ")[0]
        lines = part.partition("\nShows:\n\n")[2].partition("\n\n")[0].splitlines()
        found[row.key] = [line.removeprefix("    ") for line in lines]
    return found


def page(shown: Mapping[str, Sequence[str]]) -> str:
    """docs/cloudmesh.md."""
    lines = ["# The functions of CloudMesh's report, here", ""]
    for paragraph in (MADE, KNOWLEDGE.format(", ".join(unknown()))):
        lines += [*wrap(paragraph, PAGE_WIDTH), ""]
    lines += ["| report | function | tests |", "|---|---|---|"]
    lines += [f"| {row.numbers} | {row.title} | {len(row.tests)} |" for row in ROWS]
    for row in ROWS:
        lines += ["", f"## {row.title} ({row.numbers})", ""]
        lines += [f"- *{kind}*: {text}" for kind, text in row.scenarios.items()]
        lines += ["", "Typed:", "", *(f"    {typed}" for typed in row.typed)]
        if found := shown.get(row.key):
            lines += ["", "Shows:", "", *(f"    {line}" for line in found)]
        lines += ["", "Held by:", "", *(f"- `{test}`" for test in row.tests)]
    lines += ["", "## Values that are not given", "", *wrap(DEFAULTS, PAGE_WIDTH)]
    return "\n".join(lines) + "\n"
