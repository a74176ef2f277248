"""The functions of CloudMesh's report by number, with their cases here, and the page that shows them all.

A `Section` is one function of section 4 of the report, with its typical, exceptional and alternative case;
functions without a number are not in the report. `Case.tests` (FILE::NAME) prove a case that real nodes on
one machine cannot show, or show only in part. `page` makes docs/cloudmesh.md from the sections and from the
record of `tests.cloudmesh.Play`; `shown_in` reads the record back from the page.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap

TYPICAL, EXCEPTIONAL, ALTERNATIVE = "typical", "exceptional", "alternative"
PAGE_WIDTH = 118
PLAY = "tests/test_cloudmesh.py::test_a_part_of_the_play_of_real_nodes"


@dataclass(frozen=True)
class Case:
    """`text` says what happens here; `is_played` is whether the play shows it."""

    kind: str
    text: str
    tests: Sequence[str] = ()
    is_played: bool = True


@dataclass(frozen=True)
class Section:
    """One function; `number` is its number in the report."""

    number: str
    title: str
    cases: Sequence[Case]

    @property
    def heading(self) -> str:
        return f"{self.number} {self.title}".strip()

    def key(self, case: Case) -> str:
        """Return the key by which the play records a case."""
        return f"{self.number or self.title} {case.kind}"


def typical(text: str, *tests: str) -> Case:
    return Case(TYPICAL, text, tests)


def exceptional(text: str, *tests: str) -> Case:
    return Case(EXCEPTIONAL, text, tests)


def alternative(text: str, *tests: str) -> Case:
    return Case(ALTERNATIVE, text, tests)


def elsewhere(kind: str, text: str, *tests: str) -> Case:
    """Return a case that only tests show."""
    return Case(kind, text, tests, is_played=False)


REPORT = (
    Section(
        "4.1",
        "Initialise a requester (port)",
        (
            typical("The node listens on the requested port, for both address families."),
            exceptional(
                (
                    "A port outside 1 to 65535 is refused. A machine that dies on the way "
                    "starts again with the same identity. If a package is missing or the "
                    "Python is too old, the error names the command that installs it."
                ),
                "tests/node/test_buckets.py::"
                "test_a_missing_package_for_a_bucket_is_reported_with_its_installation",
            ),
            alternative(
                "A slow machine is late and does not fail: here its process stood still for two seconds."
            ),
        ),
    ),
    Section(
        "4.2",
        "A requester joins (port)",
        (
            typical("It asks a node, is admitted, and each lists the other."),
            exceptional(
                (
                    "A port that is taken ends the program with an error if `--listen` names "
                    "exactly that port. A seed that does not answer is reported, and asked "
                    "again."
                ),
                "tests/node/test_blocked_datagrams.py::"
                "test_nodes_without_udp_join_stay_members_and_find_records",
            ),
            alternative("If the port is taken, `--port` moves on to the next free one, and says so."),
        ),
    ),
    Section(
        "4.3",
        "A requester's location",
        (
            typical("The node keeps it as long as it runs, and sends it to the others."),
            elsewhere(
                EXCEPTIONAL,
                (
                    "Behind a VPN the claimed place is wrong. Round trips to the others show "
                    "that, so the claim is doubted, and the nearest place counts instead. No "
                    "run with `place` or `near` is placed there."
                ),
                "tests/node/test_places.py::test_round_trips_reveal_a_wrong_location_and_it_gets_no_stage",
            ),
            alternative("Every location is entered by hand; without one, `near` goes by round trips alone."),
        ),
    ),
    Section(
        "4.4",
        "Training data (path)",
        (
            typical("The path is read, checked and described with its parts before anything starts."),
            exceptional("A missing part is reported before the run is placed."),
            alternative(
                (
                    "URLs and buckets are read according to their kind (http, https, s3, "
                    "gs). Any other kind is refused with a list of these. A bucket whose "
                    "package is missing is refused with the command that installs the "
                    "package."
                ),
                "tests/node/test_buckets.py::test_a_table_in_a_bucket_is_read_from_a_real_server",
            ),
        ),
    ),
    Section(
        "4.5",
        "Configuration of a run (file)",
        (
            typical("Batch, rate, epochs, peers, model and data of a RUN.toml are read, and the run trains."),
            exceptional(
                "A model of 100 billion parameters with batches of one is refused by the "
                "requester before any provider is asked. The error names what one layer "
                "needs and what the largest peer offers."
            ),
            alternative(
                "Without a model, images take the defaults of `vision` and a text those of `language`.",
                "tests/node/test_task_defaults.py::test_a_run_without_a_model_gets_the_default_for_its_data",
            ),
        ),
    ),
    Section(
        "4.6",
        "Batch size",
        (
            typical("16 samples an iteration."),
            exceptional(
                "A value outside 1 to 1,048,576, or more than the model or a step takes, is refused with the "
                "largest that is possible. It is not clipped in silence. "
                '`microbatch = "auto"` chooses a size that the providers can bear.',
            ),
            alternative("The default is 128, or 64 for a language model."),
        ),
    ),
    Section(
        "4.7",
        "Learning rate",
        (
            typical("0.001, 0.01 or 0.1."),
            exceptional(
                (
                    "100 is refused. A rate within the range that makes the training "
                    "overflow ends the run with the step named, or skips that step; no "
                    "provider stops."
                ),
                "tests/test_runs_end.py::test_a_run_that_diverges_ends_with_its_last_good_checkpoint",
            ),
            alternative(
                "A negative rate is refused. It is not replaced by 0.001, which is "
                "the default if none is given."
            ),
        ),
    ),
    Section(
        "4.8",
        "Epochs",
        (
            typical("A number of passes over the training samples."),
            exceptional(
                "A fraction of an epoch is trained as that many steps. More than "
                "10,000,000 steps are refused, so that a provider is free again one day. "
                "The provider's owner can release it at any time, whatever was asked for."
            ),
        ),
    ),
    Section(
        "4.9",
        "Model type",
        (
            typical("A built-in model, a captured file, a Hugging Face folder or a function of one's own."),
            exceptional(
                "For 100 billion parameters, see 4.5. An unknown name is refused with the nearest known one."
            ),
            alternative("`vision` and `language` are the named defaults."),
        ),
    ),
    Section(
        "4.10",
        "Desired device: CPU, GPU, MPS",
        (
            typical("Only peers that compute on the wanted device are taken."),
            exceptional(
                "If nobody has that kind, the error says how many do. A kind that is not "
                "supported is refused."
            ),
            alternative(
                (
                    "`common` takes the most frequent kind nearby. By default every kind "
                    "counts by its measured speed, so that one GPU among three CPUs is not "
                    "left out."
                ),
                "tests/node/test_places.py::test_devices_are_tried_in_order_and_the_outcome_is_reported",
            ),
        ),
    ),
    Section(
        "4.11",
        "Number of providers wanted",
        (
            typical("The providers are found, connected and named."),
            exceptional(
                (
                    "With `replicas_min`, too few peers are an error that says how many "
                    "there are. `--wait` waits for more."
                ),
                "tests/test_runs_end.py::test_a_run_waits_for_missing_peers_if_asked_to",
            ),
            alternative("`stages` and `replicas` are reduced to what exists, and the reduction is reported."),
        ),
    ),
    Section(
        "4.12",
        "A requester leaves",
        (
            typical("The goodbye is sent and confirmed, and the others forget the node."),
            exceptional(
                (
                    "The goodbye is lost, because here the process is killed. Within seconds "
                    "nobody lists the node; no ghost stays."
                ),
                "tests/node/test_leaving.py::test_a_process_that_cannot_leave_in_order_still_ends",
            ),
            alternative(
                "It leaves while its run is under way. The requester first hands over, "
                "and the members finish the run."
            ),
        ),
    ),
    Section(
        "4.13",
        "Start training",
        (
            typical("From here on the members continue by themselves; there is no coordinator."),
            exceptional(
                "A provider vanishes between assignment and start: it is killed as soon as it holds the "
                "lease."
            ),
            alternative("Other providers are looked for, up to the wanted number, and the run completes."),
        ),
    ),
    Section(
        "4.14",
        "Receive results",
        (
            typical("The weights are fetched, and all providers are free again."),
            exceptional(
                "There is no leader that could vanish: the requester left before the end, as in 4.12.",
                "tests/test_requester_restarts.py::test_a_restarted_requester_learns_how_its_run_ended",
            ),
            alternative("Every member has the result, so another node fetches it."),
        ),
    ),
    Section(
        "4.15",
        "Initialise a provider",
        (
            typical("As 4.1; in addition the node states what it offers."),
            exceptional(
                "Too little memory or too few cores are reported at the start. A full disk raises an alert.",
                "tests/node/alerts/test_alerts.py::test_a_full_disk_wrong_clock_and_bad_peer_are_reported",
            ),
            alternative(
                "Background load makes a provider slower: here one stood still for two seconds in mid-run."
            ),
        ),
    ),
    Section(
        "4.16",
        "A provider joins (port)",
        (
            typical("As 4.2."),
            exceptional("As 4.2."),
            alternative("As 4.2."),
        ),
    ),
    Section(
        "4.17",
        "A provider's location",
        (
            typical("As 4.3; a run that asks for this place is placed here."),
            elsewhere(
                EXCEPTIONAL,
                "As 4.3.",
                "tests/node/test_places.py::test_round_trips_reveal_a_wrong_location_and_it_gets_no_stage",
            ),
            alternative("The place is entered by hand, at the start or while the node runs."),
        ),
    ),
    Section(
        "4.18",
        "Memory offered",
        (
            typical("The planner may use up to this much, and takes what a run needs."),
            exceptional(
                "Too little memory is reported with the reason, and no stage that "
                "does not fit is placed there."
            ),
            alternative("The default is 80 % of the machine's memory."),
        ),
    ),
    Section(
        "4.19",
        "Cores offered",
        (
            typical("The node offers this many."),
            exceptional(
                "Fewer cores than slots are reported. A number above the machine's "
                "cores is corrected, and that is reported."
            ),
            alternative("The default is all cores."),
        ),
    ),
    Section(
        "4.20",
        "Device: CPU, GPU, MPS",
        (
            typical("`auto` prefers a GPU, then MPS, then the CPU."),
            exceptional("A wrong declaration is detected when the device is used, and reported."),
            alternative("The node falls back to the CPU and goes on."),
        ),
    ),
    Section(
        "4.21",
        "Accept requests",
        (
            typical("The node is marked as ready; a slot holds one task at a time."),
            exceptional(
                "Several requesters ask simultaneously, and each slot goes to one of them.",
                "tests/node/test_slots.py::test_only_one_of_two_racing_requesters_gets_the_provider",
            ),
            alternative(
                "The others get the reason, look for another provider, and try again, until all are served.",
                "tests/node/test_turns.py::test_each_of_a_hundred_submissions_is_served_in_the_end",
            ),
        ),
    ),
    Section(
        "4.22",
        "A provider leaves",
        (
            typical("The goodbye is sent to all, and confirmed."),
            exceptional("The goodbye is lost, as in 4.12, so probes detect the death."),
            alternative("The node holds a stage: the stage is handed over, and the run goes on."),
        ),
    ),
)

BEYOND = (
    Section(
        "",
        "Watching training",
        (
            typical(
                "Loss, metrics by name and rates, on every member.",
                "tests/test_runs_end.py::test_a_run_that_diverges_ends_with_its_last_good_checkpoint",
            ),
        ),
    ),
    Section(
        "",
        "Pausing and changing a run",
        (
            typical(
                (
                    "The change takes effect at the next step, on all members alike, and is "
                    "signed by the requester."
                ),
                "tests/test_revisions.py::test_a_revised_learning_rate_survives_the_committers_death",
            ),
            exceptional(
                "Nobody can stop another's run.",
                "tests/test_runs_end.py::test_only_the_requester_may_stop_a_run",
            ),
        ),
    ),
    Section(
        "",
        "Validation and the best state",
        (
            typical(
                (
                    "The run is validated on samples of its own. It ends when it no longer "
                    "improves, and the best state is the result."
                ),
                "tests/test_validation.py::test_early_stopping_keeps_its_step_if_the_committer_dies",
                "tests/test_validation.py::test_the_result_is_the_state_that_validated_best",
            ),
        ),
    ),
    Section(
        "",
        "Predictions on new samples",
        (
            typical(
                (
                    "The outputs are written to a file, with metrics by name and a confusion "
                    "matrix as a picture."
                ),
                "tests/test_predict.py::test_outputs_are_those_of_the_model_and_are_compared_with_the_truth",
            ),
            elsewhere(
                EXCEPTIONAL,
                "Weights of another model are refused.",
                "tests/test_predict.py::test_impossible_predictions_are_refused_with_a_reason",
            ),
        ),
    ),
    Section(
        "",
        "Shares by what each has given",
        (
            typical(
                "The shares follow from receipts that both sides have signed.",
                "tests/node/test_turns.py::test_requesters_that_always_want_more_get_weighted_shares",
            ),
            elsewhere(
                EXCEPTIONAL,
                "A receipt for a run that this node never took part in is not signed.",
                "tests/node/test_receipts.py::test_a_receipt_for_a_run_unknown_to_the_provider_is_not_signed",
            ),
        ),
    ),
    Section(
        "",
        "Data that stays with its owner",
        (
            typical(
                "Each peer trains on its own data set of that name; only models are averaged.",
                "tests/node/local/test_federated.py::test_federated_members_train_on_own_data_and_send_none",
            ),
            exceptional("Such data is refused in exact mode, where samples would travel."),
        ),
    ),
)

SECTIONS = (*REPORT, *BEYOND)

EXCEPTIONS = (
    ("A provider leaves in mid-training", "4.22", "tests/test_kills.py"),
    (
        "The transfer of data or a model is cut off",
        "pieces and blobs are verified by hash and requested again",
        "tests/node/test_blob_fetch.py",
    ),
    ("NAT or firewall", "it becomes a client of the DHT, and dials out", "tests/node/test_reach.py"),
    ("The hardware differs from what was declared", "4.20", "tests/node/test_limits.py"),
    ("Data or configuration in a wrong format", "4.4, 4.5", "tests/node/test_bad_data.py"),
    (
        "Resources run out in mid-task",
        "the stage is handed over or the frames go to disk",
        "tests/test_owner_back.py",
    ),
    (
        "Too few providers",
        ("4.11: the run is reduced or refused, or waits with `--wait`"),
        "tests/test_runs_end.py",
    ),
    (
        "The bootstrap node is down",
        "there is none: a node joins through any other, and remembers others",
        "tests/test_forks.py",
    ),
)
VARIATIONS = (
    ("Slow or faulty members", "rounds go on without them", "tests/node/optimizer/test_stalls.py"),
    (
        "Another transport",
        "TCP and UDP are separate, and each alone is enough",
        "tests/node/test_blocked_datagrams.py",
    ),
    ("Providers chosen by their hardware", "4.10, 4.18, 4.19", "tests/node/test_places.py"),
    ("By closeness", "4.3", "tests/node/test_places.py"),
    ("Another kind of task", "4.9: any module, a text or a table", "tests/test_corpus.py"),
    ("Epochs and partitions varied", "4.8; docs/partitions.md has ten partitions", "benchmarks/cloudmesh.py"),
    ("More or fewer peers", "docs/headline.md and docs/partitions.md have 2 and 4", "benchmarks/headline.py"),
    ("Limits of cores and memory", "4.18, 4.19", "tests/node/test_limits.py"),
)

MADE = (
    "Made by a test run on real nodes, do not edit: `PEERLOOM_DOCS=write python -m "
    "pytest -n0 tests/test_cloudmesh.py`. Indented lines are commands as they were "
    "typed in that run, each followed by the part of its output that the test "
    "asserts."
)
WHAT = (
    "CloudMesh's report describes 22 functions of a system with a bootstrap node "
    "per region and a leader that averages. Peerloom has neither, so each section "
    "says what the function is here, in its typical, exceptional and alternative "
    "case. In the report, 4.8 has no alternative case. docs/headline.md repeats "
    "the report's experiment with data that can be had here."
)
RULE = (
    "One rule holds for every number that a person gives: a number outside its "
    "range is refused before anything starts, with the line where it stands, and "
    "is never replaced. If something is chosen, reduced or corrected to what "
    "exists, the program says so."
)


def cases() -> Iterator[tuple[Section, Case]]:
    """Yield every case with its section."""
    for section in SECTIONS:
        for case in section.cases:
            yield section, case


def shown_in(text: str) -> dict[str, list[str]]:
    """Return the commands and outputs in the page, by case."""
    found: dict[str, list[str]] = {}
    for section, case in cases():
        part = text.partition(f"\n## {section.heading}\n")[2].partition("\n## ")[0]
        after = re.split(r"\n(?=\*)", part.partition(f"*{case.kind.capitalize()}.*")[2])[0]
        lines = [line[4:] for line in after.splitlines() if line.startswith("    ")]
        if lines:
            found[section.key(case)] = lines
    return found


def page(shown: Mapping[str, Sequence[str]]) -> str:
    """Return docs/cloudmesh.md."""
    lines = ["# The functions of CloudMesh's report, here", ""]
    for paragraph in (MADE, WHAT, RULE):
        lines += [*wrap(paragraph, PAGE_WIDTH, break_on_hyphens=False), ""]
    for section in REPORT:
        lines += _section(section, shown)
    for title, rows in (("Exceptions", EXCEPTIONS), ("Variations", VARIATIONS)):
        lines += [f"## {title}", "", "| the report's | here | shown by |", "|---|---|---|"]
        lines += [
            f"| {number}. {name} | {text} | {test} |" for number, (name, text, test) in enumerate(rows, 1)
        ]
        lines += [""]
    for section in BEYOND:
        lines += _section(section, shown)
    return "\n".join(lines).rstrip() + "\n"


def _section(section: Section, shown: Mapping[str, Sequence[str]]) -> list[str]:
    lines = [f"## {section.heading}", ""]
    for case in section.cases:
        lines += [*wrap(f"*{case.kind.capitalize()}.* {case.text}", PAGE_WIDTH, break_on_hyphens=False), ""]
        if found := shown.get(section.key(case)):
            lines += [*(f"    {line}" for line in found), ""]
        tests = [*([PLAY] if case.is_played else []), *case.tests]
        lines += [f"Held by `{test}`." for test in case.tests] + ([""] if case.tests else [])
        assert tests, f"no command and no test shows {section.key(case)}"
    return lines
