"""Scenario files are read strictly, with errors that name the line, and a written file reads back the
same."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.errors import UsageError
from sim.churn.model import Churn, ChurnEvent, Distribution, Version
from sim.network.model import Access, NetworkModel, Region
from sim.scenario import (
    BUILT_IN,
    Checks,
    RecordsScenario,
    Scenario,
    SwarmStart,
    TrainingScenario,
    load,
    text_of,
    to_toml,
    with_values,
)

HEAD = 'name = "mine"\nabout = "a test"\n'
REGIONS = """
[network]
between_seconds = [[0.01, 0.1], [0.1, 0.01]]
[[network.regions]]
name = "asia"
share = 0.5
[[network.regions]]
name = "europe"
share = 0.5
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
seconds = st.floats(0, 500)
shares = st.floats(0, 1)
positive = st.floats(0.1, 1e6)
distributions = st.builds(
    Distribution, st.sampled_from(["weibull", "bathtub", "constant"]), positive, st.floats(0.1, 9)
)
churns = st.builds(
    Churn,
    profile=st.sampled_from(["none", "kad", "spot"]),
    sessions=distributions,
    absences=distributions,
    speedup=positive,
    permanent=st.integers(0, 9),
    crash_share=shares,
    remembers=st.booleans(),
    wave_depth=shares,
    versions=st.just((Version("1", 0.25), Version("2", 0.5))),
)
networks = st.builds(
    NetworkModel,
    nearest_seconds=st.floats(0, 0.05),
    loss=shares,
    regions=st.just((Region("asia", 0.25, (0.0, 1.5)), Region("europe", 0.75))),
    between_seconds=st.tuples(*[st.tuples(seconds, seconds)] * 2),
    access=st.tuples(st.builds(Access, share=shares, up_mbit_per_second=positive, nat=st.just("symmetric"))),
)
events = st.builds(
    ChurnEvent,
    at_seconds=seconds,
    kind=st.sampled_from(["crash", "freeze", "slow", "loss"]),
    share=shares,
    regions=st.sampled_from([(), ("asia",), ("asia", "europe")]),
    lasts_seconds=st.floats(0.001, 100),
    every_seconds=seconds,
)
scenarios = st.builds(
    Scenario,
    name=texts,
    about=texts,
    nodes=st.integers(9, 100),
    seconds=st.floats(501, 1e6),
    encoded=st.booleans(),
    start=st.builds(SwarmStart, spread_seconds=st.floats(0, 499)),
    network=st.just(NetworkModel()) | networks,
    churn=churns,
    events=st.just(()),
    records=st.builds(RecordsScenario, lookups_per_second=positive, republish_seconds=st.floats(0, 1)),
    runs=st.lists(st.builds(TrainingScenario, learning_rate=st.floats(-1, 1)), max_size=2).map(tuple),
    checks=st.builds(Checks, found_share=shares),
)


@settings(deadline=None)
@given(scenarios, st.lists(events, max_size=3).map(tuple))
def test_a_written_scenario_reads_back_the_same(
    tmp_path_factory: pytest.TempPathFactory, scenario: Scenario, some: tuple[ChurnEvent, ...]
) -> None:
    if scenario.network.regions:
        scenario = msgspec.structs.replace(scenario, events=some)
    path = written(tmp_path_factory.getbasetemp(), to_toml(scenario))
    assert load(path) == scenario
    assert with_values(scenario, {}) == scenario


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_scenarios_are_valid_and_have_explanations(name: str) -> None:
    scenario = load(name)
    assert scenario.name == name
    assert len(scenario.about) > 20
    text = text_of(name)
    assert text.startswith("#")
    assert text.count("#") >= 4


def test_built_in_scenarios_are_part_of_the_package() -> None:
    shipped = {path.stem for path in (Path(__file__).parents[2] / "sim" / "scenarios").glob("*.toml")}
    assert shipped == set(BUILT_IN)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[churn]\n\nsead = 7", "unknown key 'sead' in [churn]"),
        ("[churn]\n\npermanant = 7", "unknown key 'permanant' in [churn]; did you mean 'permanent'?"),
        ("\n\nnodes = 0", "nodes = 0: want a whole number, 1 to 100000"),
        ("\n\nnodes = 2.5", "nodes = 2.5: want a whole number, 1 to 100000"),
        ("[network]\n\nloss = 1.1", "network.loss = 1.1: want a finite number, 0 to 1"),
        ('[churn]\n\nprofile = "bittorent"', 'churn.profile = "bittorent": want one of '),
        ("[churn.sessions]\n\nshape = 2", "[churn.sessions] lacks the key 'distribution'"),
        ("[churn.sessions]\n\nscale = 2", "unknown key 'scale' in [churn.sessions]"),
        ('[[events]]\nat_seconds = 5\nkind = "crush"', 'events.kind = "crush": want one of '),
        (
            '[[network.regions]]\nshare = 1\ninside_seconds = [1]\nname = "a"',
            "network.regions.inside_seconds = [1]: want a list of 2: ",
        ),
    ],
)
def test_the_error_names_an_invalid_value_and_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = written(tmp_path, HEAD + text)
    with pytest.raises(UsageError) as caught:
        load(path)
    line = 3 if "lacks" in complaint else 5
    assert str(caught.value).startswith(f"{path}:{line}: {complaint}")


@pytest.mark.parametrize(
    ("text", "line", "complaint"),
    [
        ("[churn]\npermanent = 101", 4, "churn.permanent = 101: there are only 100 nodes"),
        ("[start]\nlate_share = 0.5", 4, "start.late_share keeps peers back, but no event of kind join"),
        ("[start]\nacquainted = true", 4, "start.acquainted: all peers start at the same time. Set start."),
        (
            "[start]\nspread_seconds = 0\nacquainted = true\n"
            '[[network.access]]\nshare = 0.5\nnat = "full-cone"',
            5,
            "start.acquainted: peers behind a NAT must find that out first",
        ),
        (
            "[start]\nspread_seconds = 0\nacquainted = true\n"
            '[[events]]\nkind = "freeze"\nat_seconds = 0\nlasts_seconds = 1',
            8,
            "at_seconds = 0 of an event of kind freeze: at that instant",
        ),
        (
            'fidelity = "stack"\n[start]\nspread_seconds = 0\nacquainted = true',
            6,
            'start.acquainted: whole nodes find each other themselves. Set fidelity = "cores"',
        ),
        (
            '[[events]]\nat_seconds = 5\nkind = "join"',
            5,
            "no peer is kept back for an event of kind join. Set start.late_share",
        ),
        (
            '[[events]]\nkind = "crash"\nat_seconds = 601',
            5,
            "at_seconds = 601 of events: the scenario ends after 600",
        ),
        (
            REGIONS + '[[events]]\nat_seconds = 5\nkind = "crash"\nregions = ["azia"]',
            15,
            "no region is called 'azia'; did you mean 'asia'?",
        ),
        (
            '[[events]]\nat_seconds = 5\nkind = "crash"\nversions = ["2.0"]',
            6,
            "no version is called '2.0'; known: none",
        ),
        (REGIONS.replace("0.5", "0.6"), 4, "[network] the shares of the regions do not sum up to 1"),
        (
            "[[network.access]]\nshare = 0.6\n[[network.access]]\nshare = 0.6",
            3,
            "[network] the shares of access sum up to more than 1",
        ),
        (
            REGIONS.replace(", [0.1, 0.01]]", "]"),
            4,
            "[network] between_seconds must have 2 rows of 2 figures, one per region",
        ),
        (REGIONS.replace('"asia"', '"europe"'), 4, "[network] two regions have the same name"),
        (
            '[[events]]\nat_seconds = 5\nkind = "freeze"\nlasts_seconds = 0',
            6,
            "lasts_seconds = 0 of an event of kind freeze: such an event has no effect",
        ),
        (
            '[churn.sessions]\ndistribution = "exponential"',
            3,
            "churn.sessions without absences. Add [churn.absences]",
        ),
        (
            '[churn]\nprofile = "lab"\nsessions.distribution = "constant"',
            5,
            "churn.sessions together with profile lab, which is a timetable",
        ),
        ("nodes = 5\n[[runs]]\nmembers = 6", 5, "members = 6 of runs: there are only 5 nodes"),
        ("nodes = 5\n[[local_runs]]\nmembers = 6", 5, "members = 6 of local_runs: there are only 5 nodes"),
        ("[[runs]]\nreplicas = 4", 4, "2 stages of 4 replicas need 8 members, but the run has 6"),
        ("[[runs]]\naccuracy = 0.9", 4, "accuracy of a run: only fidelity = "),
        ("[records]\nrepublish_seconds = 7200", 4, "records.republish_seconds: a record expires before"),
        (
            "[checks]\nconverge_seconds = 601",
            4,
            "checks.converge_seconds: the scenario ends before this time has passed",
        ),
        ("[checks]\nfound_share = 0.9", 4, "checks.found_share counts from 1820 s, when all have started"),
        ('fidelity = "stack"\nnodes = 300', 4, "nodes = 300: at most 200 whole nodes. For more"),
    ],
)
def test_contradicting_values_are_reported_with_a_line(
    tmp_path: Path, text: str, line: int, complaint: str
) -> None:
    path = written(tmp_path, HEAD + text)
    with pytest.raises(UsageError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}:{line}: {complaint}")


def test_a_trace_path_is_relative_to_its_scenario_and_checked(tmp_path: Path) -> None:
    (tmp_path / "lab.csv").write_text("a,0,up\nb,5,up\na,9,down\n")
    path = written(tmp_path, HEAD + 'nodes = 3\n[churn]\ntrace = "lab.csv"')
    assert load(path).churn.trace == str(tmp_path / "lab.csv")
    written(tmp_path, HEAD + 'nodes = 2\n[churn]\ntrace = "lab.csv"')
    with pytest.raises(
        UsageError, match=r"mine.toml:5: churn.trace has 2 peers, but of 2 nodes only 1 may come and go"
    ):
        load(path)
    (tmp_path / "lab.csv").write_text("a,0,up\nb,5,maybe\n")
    with pytest.raises(UsageError, match=r"lab.csv:2: 'maybe' is neither up nor down"):
        load(path)


def test_errors_suggest_the_nearest_name_and_report_missing_files() -> None:
    with pytest.raises(UsageError, match=r"there is no scenario 'chrun'; did you mean 'churn'"):
        load("chrun")
    with pytest.raises(UsageError, match=r"there is no scenario 'x'; use one of lan, wan, .* path of a file"):
        load("x")
    with pytest.raises(UsageError, match=r"nowhere/x.toml: no such file"):
        load("nowhere/x.toml")


def test_set_options_change_single_values() -> None:
    scenario = with_values(
        load("wan"),
        {
            "nodes": "300",
            "churn.speedup": "10",
            "churn.profile": "kad",
            "churn.remembers": "false",
            "network.regions.1.name": "africa",
            "churn.sessions.distribution": "constant",
            "about": "what I want",
        },
    )
    assert (scenario.nodes, scenario.churn.speedup, scenario.churn.profile) == (300, 10.0, "kad")
    assert (scenario.churn.remembers, scenario.network.regions[1].name) == (False, "africa")
    assert (scenario.churn.sessions, scenario.about) == (Distribution("constant"), "what I want")


@pytest.mark.parametrize(
    ("key", "text", "complaint"),
    [
        ("nodes", "many", '--set nodes=many: nodes = "many": want a whole number, 1 to 100000'),
        ("nods", "5", "--set nods=5: unknown key 'nods'; did you mean 'nodes'?"),
        ("chrun.speedup", "5", "--set chrun.speedup=5: unknown key 'chrun'; did you mean 'churn'?"),
        ("churn.speed", "5", "--set churn.speed=5: unknown key 'speed' in [churn]; did you mean 'speedup'?"),
        ("nodes.x", "5", "--set nodes.x=5: nodes is a value, not a table"),
        ("events.3.share", "1", "--set events.3.share=1: events has 1 items: use an index such as events.0"),
        ("nodes", "7", "--set nodes=7: churn.permanent = 20: there are only 7 nodes"),
        ("name", "5", "--set name=5: name = 5: want text"),
    ],
)
def test_an_invalid_set_option_is_reported_like_a_value_in_a_file(
    key: str, text: str, complaint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        with_values(load("partition"), {key: text})
    assert str(caught.value) == complaint
