"""The functions of CloudMesh's report by number, their cases here, and the page of all of them.

A `Section` is a function of the report's section 4, with its typical, exceptional and alternative case;
functions without a number are not in the report. `Case.tests` (FILE::NAME) prove a case that real nodes on
one machine cannot show, or show only in part. `page` makes docs/cloudmesh.md from these and from the record
of `tests.cloudmesh.Play`; `shown_in` reads that back.
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
    """A sentence on what happens here; `is_played`: the play shows it."""

    kind: str
    text: str
    tests: Sequence[str] = ()
    is_played: bool = True


@dataclass(frozen=True)
class Section:
    """One function; `number` is the report's."""

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
            typical("Ready at the port that was asked for, for both address families."),
            exceptional(
                "A port outside of 1 to 65535 is refused. A machine that dies on the way starts again "
                "with the "
                "same identity. A package that is missing or a Python that is too old is said with the "
                "command "
                "that installs it.",
                "tests/node/test_buckets.py::"
                "test_a_missing_package_for_a_bucket_is_named_with_its_installation",
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
                "A port that is taken is an error that ends the program where `--listen` names it exactly. A "
                "seed that does not answer is said, and asked again.",
                "tests/node/test_blocked_datagrams.py::"
                "test_nodes_without_udp_join_stay_alive_and_find_records",
            ),
            alternative("A port that is taken: `--port` moves on to the next free one, and says so."),
        ),
    ),
    Section(
        "4.3",
        "A requester's location",
        (
            typical("Kept for the life of the node, and told to the others."),
            elsewhere(
                EXCEPTIONAL,
                "Behind a VPN the place that is claimed is wrong: round trips to the others say so, the "
                "claim is doubted, and the nearest place counts. No run with `place` or `near` lands there.",
                "tests/node/test_places.py::test_latency_exposes_a_wrong_location_which_gets_no_stage",
            ),
            alternative(
                "Entered by hand: every location is, and `near` without one goes by round trips alone."
            ),
        ),
    ),
    Section(
        "4.4",
        "Training data (path)",
        (
            typical("The path is read, checked and described with its parts before anything starts."),
            exceptional("A part that is missing is said before the run is placed."),
            alternative(
                "URLs and buckets work by their kind (http, https, s3, gs); any other is refused with "
                "those, and "
                "a bucket without its package with the command that installs it.",
                "tests/node/test_buckets.py::test_a_table_in_a_bucket_is_read_from_a_real_server",
            ),
        ),
    ),
    Section(
        "4.5",
        "Configuration of a run (file)",
        (
            typical("Batch, rate, epochs, peers, model and data of a RUN.toml: trained."),
            exceptional(
                "A model of 100 billion parameters by batches of one is refused by the requester, before any "
                "provider is asked, with what one layer needs and what the largest peer offers."
            ),
            alternative(
                "No model at all: images take the defaults of `vision`, a text those of `language`.",
                "tests/node/test_task_defaults.py::test_a_run_without_a_model_takes_that_of_its_kind",
            ),
        ),
    ),
    Section(
        "4.6",
        "Batch size",
        (
            typical("16 samples an iteration."),
            exceptional(
                "Outside of 1 to 1,048,576, or more than the model or a step takes: refused with the "
                "most that "
                'goes. It is not clipped in silence: `microbatch = "auto"` chooses what providers can bear.'
            ),
            alternative("None is given: 128, or 64 for a language model."),
        ),
    ),
    Section(
        "4.7",
        "Learning rate",
        (
            typical("0.001, 0.01 or 0.1."),
            exceptional(
                "100 is refused. One that overflows within the range ends the run with its step, or "
                "skips that "
                "step; no provider ends.",
                "tests/test_runs_end.py::test_a_run_that_diverges_ends_with_its_last_good_checkpoint",
            ),
            alternative("Below 0: refused, not replaced by 0.001, which is the default where none is given."),
        ),
    ),
    Section(
        "4.8",
        "Epochs",
        (
            typical("A number of passes over the training samples."),
            exceptional(
                "A part of an epoch is as many steps. More than 10,000,000 steps are refused, so that a "
                "provider "
                "is released one day; its owner releases it at once, whatever was asked for."
            ),
        ),
    ),
    Section(
        "4.9",
        "Model type",
        (
            typical("A built-in model, a captured file, a Hugging Face folder or a function of one's own."),
            exceptional(
                "100 billion parameters: as in 4.5. An unknown name is refused with the nearest one."
            ),
            alternative("`vision` and `language` are the named defaults."),
        ),
    ),
    Section(
        "4.10",
        "Desired device: CPU, GPU, MPS",
        (
            typical("Only peers that compute on it are taken."),
            exceptional(
                "A kind that nobody has: how many have it is said. A kind that is not supported: refused."
            ),
            alternative(
                "`common`: the most frequent kind near by. Where none is given every kind counts by its "
                "measured "
                "speed, so that one GPU beside three CPUs is not left out.",
                "tests/node/test_places.py::test_devices_are_tried_in_order_and_the_outcome_is_reported",
            ),
        ),
    ),
    Section(
        "4.11",
        "Number of providers wanted",
        (
            typical("Found, connected and named."),
            exceptional(
                "`replicas_min` insists: an error says how many there are. `--wait` waits for more.",
                "tests/test_runs_end.py::test_a_run_waits_for_missing_peers_if_asked_to",
            ),
            alternative(
                "`stages` and `replicas` are reduced by themselves to what exists, and that is said."
            ),
        ),
    ),
    Section(
        "4.12",
        "A requester leaves",
        (
            typical("Said, confirmed, and forgotten by the others."),
            exceptional(
                "The goodbye is lost: here the process is killed. Within seconds nobody lists it; no "
                "ghost stays.",
                "tests/node/test_leaving.py::test_a_process_that_cannot_end_in_order_ends_all_the_same",
            ),
            alternative(
                "While its run is under way: the members finish it, and the requester has handed over first."
            ),
        ),
    ),
    Section(
        "4.13",
        "Start training",
        (
            typical("From here on the members go by themselves; there is no coordinator."),
            exceptional(
                "A provider vanishes between assignment and start: it is killed as soon as it holds the "
                "lease."
            ),
            alternative(
                "Another provider is looked for, to the number that was wanted, and the run is done."
            ),
        ),
    ),
    Section(
        "4.14",
        "Receive results",
        (
            typical("The weights are fetched, and all providers are free again."),
            exceptional(
                "There is no leader that could be gone: the requester left before the end, as in 4.12.",
                "tests/test_requester_restarts.py::"
                "test_a_requester_that_was_restarted_hears_how_its_run_ended",
            ),
            alternative("Any member has the result: another node fetches it."),
        ),
    ),
    Section(
        "4.15",
        "Initialise a provider",
        (
            typical("As 4.1, with what it gives."),
            exceptional(
                "Too little memory or too few cores are said at the start. A full disk is an alert.",
                "tests/node/alerts/test_alerts.py::test_a_full_disk_wrong_clock_and_bad_peer_are_reported",
            ),
            alternative(
                "Load in the background makes it slower: here a provider stood still for two seconds in "
                "mid-run."
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
            typical("As 4.3; a run that asks for the place is placed there."),
            elsewhere(
                EXCEPTIONAL,
                "As 4.3.",
                "tests/node/test_places.py::test_latency_exposes_a_wrong_location_which_gets_no_stage",
            ),
            alternative("Entered by hand, at the start or while it runs."),
        ),
    ),
    Section(
        "4.18",
        "Memory offered",
        (
            typical("So much, of which the planner picks by need."),
            exceptional("Too little is said, with the reason; what does not fit is not placed there."),
            alternative("None is given: 80 % of what there is."),
        ),
    ),
    Section(
        "4.19",
        "Cores offered",
        (
            typical("So many."),
            exceptional("Fewer than slots: said. More than there are: corrected, and said."),
            alternative("None is given: all."),
        ),
    ),
    Section(
        "4.20",
        "Device: CPU, GPU, MPS",
        (
            typical("`auto` prefers a GPU, then MPS, then the CPU."),
            exceptional("A wrong declaration is found when it is used, and said."),
            alternative("It falls back to the CPU and goes on."),
        ),
    ),
    Section(
        "4.21",
        "Accept requests",
        (
            typical("Marked as ready; a slot holds one task at a time."),
            exceptional(
                "Several requesters at once: each slot goes to one.",
                "tests/node/test_slots.py::test_one_of_two_racing_requesters_gets_the_provider",
            ),
            alternative(
                "The others are told why, look for another provider, and try again: all are served.",
                "tests/node/test_turns.py::test_each_of_a_hundred_submissions_gets_its_turn",
            ),
        ),
    ),
    Section(
        "4.22",
        "A provider leaves",
        (
            typical("Said to all, confirmed."),
            exceptional("The goodbye is lost, as in 4.12: a death is found by probes."),
            alternative("While it holds a stage: the stage is handed over, and the run goes on."),
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
                "From the next step on, on all members alike, signed by the requester.",
                "tests/test_revisions.py::test_a_revised_learning_rate_survives_the_committers_death",
            ),
            exceptional(
                "Another's run cannot be stopped.",
                "tests/test_runs_end.py::test_only_the_requester_may_stop_a_run",
            ),
        ),
    ),
    Section(
        "",
        "Validation and the best state",
        (
            typical(
                "On samples of its own; it ends where it no longer improves, and the best state is the "
                "result.",
                "tests/test_validation.py::test_a_run_stops_early_at_the_same_step_though_its_committer_dies",
                "tests/test_validation.py::test_the_result_is_the_state_that_validated_best",
            ),
        ),
    ),
    Section(
        "",
        "Predictions on new samples",
        (
            typical(
                "Outputs, metrics by name and a confusion matrix, as a file and a picture.",
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
                "By receipts that both sides have signed.",
                "tests/node/test_turns.py::test_requesters_that_always_want_more_get_shares_by_their_weights",
            ),
            elsewhere(
                EXCEPTIONAL,
                "A receipt for a run that was never here is not signed.",
                "tests/node/test_receipts.py::test_a_receipt_for_a_run_that_was_never_here_is_not_signed",
            ),
        ),
    ),
    Section(
        "",
        "Data that stays with its owner",
        (
            typical(
                "Each trains on its own set of that name; only models are averaged.",
                "tests/node/local/test_federated.py::test_federated_members_train_on_own_data_and_send_none",
            ),
            exceptional("Refused in exact mode, where samples would travel."),
        ),
    ),
)

SECTIONS = (*REPORT, *BEYOND)

EXCEPTIONS = (
    ("A provider goes in mid-training", "4.22", "tests/test_kills.py"),
    (
        "Data or a model is cut off on the way",
        "pieces and blobs are verified by hash and asked for again",
        "tests/node/test_blob_fetch.py",
    ),
    ("NAT or firewall", "it becomes a client of the DHT, and dials out", "tests/node/test_reach.py"),
    ("Hardware is not what was declared", "4.20", "tests/node/test_limits.py"),
    ("Data or configuration of a wrong format", "4.4, 4.5", "tests/node/test_bad_data.py"),
    (
        "Resources run out in mid-task",
        "the stage is handed over or the frames go to disk",
        "tests/test_owner_back.py",
    ),
    ("Too few providers", "4.11: reduced, refused, or waits with `--wait`", "tests/test_runs_end.py"),
    (
        "The bootstrap node is down",
        "there is none: any node is joined through, and others are remembered",
        "tests/test_forks.py",
    ),
)
VARIATIONS = (
    ("Slow or faulty members", "rounds go on without them", "tests/node/optimizer/test_stalls.py"),
    (
        "Another transport",
        "TCP and UDP are two, each alone is enough",
        "tests/node/test_blocked_datagrams.py",
    ),
    ("Providers chosen by hardware", "4.10, 4.18, 4.19", "tests/node/test_places.py"),
    ("By closeness", "4.3", "tests/node/test_places.py"),
    ("Another kind of task", "4.9: any module, a text or a table", "tests/test_corpus.py"),
    ("Epochs and partitions varied", "4.8; docs/partitions.md has ten partitions", "benchmarks/cloudmesh.py"),
    ("More or fewer peers", "docs/headline.md and docs/partitions.md have 2 and 4", "benchmarks/headline.py"),
    ("Limits of cores and memory", "4.18, 4.19", "tests/node/test_limits.py"),
)

MADE = (
    "Made by a test run on real nodes, do not edit: `PEERLOOM_DOCS=write python -m pytest -n0 "
    "tests/test_cloudmesh.py`. Indented lines are commands as they were typed in that run, each "
    "followed by what of "
    "its output is asserted there."
)
WHAT = (
    "CloudMesh's report describes 22 functions of a system with a bootstrap node per region and a "
    "leader that "
    "averages. Peerloom has neither; each section says what the function is here, in its typical, "
    "exceptional and "
    "alternative case. 4.8 has no alternative case in the report. The experiment of the report, "
    "repeated with data "
    "that can be had here, is in docs/headline.md."
)
RULE = (
    "One rule holds for every number that a person gives: it is refused with its line where it lies "
    "outside of its "
    "range, before anything starts, and never replaced. What is chosen, reduced or corrected to what "
    "exists is said."
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
        assert tests, f"{section.key(case)} is held by nothing"
    return lines
