"""`peerloom plan` and the function behind it: peers from a file, screen output, picture, and missing
resources."""

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace

import node
from crypto.identity import PeerId, peer_text
from node.errors import RunFailed, UsageError
from node.main import run
from node.planning.peers import (
    Peers,
    live_peers,
    measurements_document,
    read_peers,
    what_if,
)
from node.planning.picture import plan_svg
from node.planning.planner import plan_model
from node.planning.report import PlanReport, PlanWish, plan_document
from node.planning.request import graph_of, wishes
from node.planning.screen import plan_lines
from node.protocols.runs import RUNS_WORD
from node.state_documents import peers_document
from partition.model.graph import Graph, encode_graph
from partition.model.layers import with_layers
from partition.plan.cost import STAGE_BASELINE_BYTES
from partition.plan.observed import Knowledge, LinkRow, Observed, StageRow
from partition.plan.problem import BUSY_MILLIWATTS, IDLE_MILLIWATTS, Infeasible, Link
from partition.plan.rates import OperatorPace, assumed
from tests.partition.test_layers import transformer
from tests.source import ROOT
from tests.stack import simple_cnn, simulate, swarm

PEERS = """
[[peers]]
name = "lab-1"
memory = "8GB"
rate = "120GFLOPS"
link = "1Gbit"
[[peers]]
name = "mbp"
memory = "8GB"
rate = "40GFLOPS"
link = "1Gbit"
[[peers]]
name = "lab-5"
memory = "0.1GB"
rate = "900GFLOPS"
[[peers]]
name = "phone"
memory = "8GB"
rate = "1GFLOPS"
takes_runs = false
[[links]]
between = ["lab-1", "mbp"]
rate = "100Mbit"
latency = "2ms"
"""


@pytest.fixture(scope="module")
def graph() -> Graph:
    return with_layers(transformer(4))


@pytest.fixture
def peers(tmp_path: Path) -> Peers:
    file = tmp_path / "peers.toml"
    file.write_text(PEERS)
    return read_peers(str(file))


def planned(graph: Graph, peers: Peers, **wanted: object) -> PlanReport:
    return plan_model(graph, peers, PlanWish(**({"batch": 16} | wanted)), name="toy")  # type: ignore[arg-type]  # of any field


def test_a_plan_reports_excluded_peers_with_reasons(graph: Graph, peers: Peers) -> None:
    document = plan_document(planned(graph, peers))
    reasons = {row["peer"]: row["reason"] for row in document["left_out"]}
    assert reasons["phone"] == "takes no runs"
    assert reasons["lab-5"].startswith("0.1 GB free, but the smallest stage needs")
    assert document["samples_per_second"] > 0
    assert document["reasons"]


def test_the_screen_lists_every_stage_and_unused_peer(graph: Graph, peers: Peers) -> None:
    from partition.plan.problem import Constraints

    document = plan_document(planned(graph, peers, constraints=Constraints(stages=2)))
    lines = plan_lines(document, explain=True)
    assert lines[0].split() == ["STAGE", "LAYERS", "PEERS", "TIME/MICROBATCH", "MEMORY", "SENDS"]
    assert [line[0] for line in lines[1:5]] == ["1", "2", "-", "-"]
    assert sum(line.count(" <") for line in lines[1:3]) == 1
    assert "predicted, bubble" in lines[5]
    assert "why" in lines


def test_a_plan_says_whether_it_reaches_a_goal(graph: Graph, peers: Peers) -> None:
    rate = planned(graph, peers).samples_per_second
    for factor, said in ((0.5, "met, 2 times"), (2.0, "missed, 0.5 of it")):
        document = plan_document(planned(graph, peers, goal=factor * rate))
        assert document["goal"]["is_met"] == (factor < 1)
        assert f"goal of {factor * rate:g} samples/s: {said}" in plan_lines(document)
    assert not any("goal" in line for line in plan_lines(plan_document(planned(graph, peers))))
    with pytest.raises(UsageError, match="--goal has no effect with --objective latency"):
        wishes(objective="latency", goal=1.0)


def test_the_picture_is_well_formed_and_names_every_peer(graph: Graph, peers: Peers) -> None:
    document = plan_document(planned(graph, peers))
    root = ElementTree.fromstring(plan_svg(document))
    told = " ".join(element.text or "" for element in root.iter())
    for row in document["utilisation"]:
        assert row["peer"] in told


def test_a_step_is_drawn_in_the_order_of_the_stages(graph: Graph, peers: Peers) -> None:
    from partition.plan.problem import Constraints

    document = plan_document(planned(graph, peers, constraints=Constraints(stages=2)))
    assert [row["peer"] for row in document["utilisation"]] == [
        name for stage in document["stages"] for name in stage["peers"]
    ]


def test_a_hostile_name_cannot_inject_markup_into_the_picture(graph: Graph, peers: Peers) -> None:
    document = plan_document(planned(graph, peers))
    document["model"] = "<script>alert(1)</script>"
    assert "<script>" not in plan_svg(document)


def test_live_peers_are_the_node_and_its_live_members(graph: Graph) -> None:
    def row(name: str, status: str, rate: float) -> dict[str, object]:
        capacity = {"memory_free_bytes": 8 * 10**9, "flops_per_second": rate, "location": "", "device": "cpu"}
        return {"name": name, "peer": f"12D3Koo{name}", "status": status, "capacity": capacity}

    def of_version(name: str, *words: str) -> dict[str, object]:
        return {**row(name, "alive", 1e12), "standing": {"capabilities": ["stages", *words]}}

    others = [
        row("a", "alive", 2e10),
        row("b", "dead", 1e12),
        row("watcher", "alive", 0.0),
        row("me", "alive", 1e9),
        of_version("older", "runs/1"),
        of_version("new", RUNS_WORD),
    ]
    peers = live_peers(row("me", "", 1e10), {"peers": others})
    assert [peer.name for peer in peers.peers] == ["me", "a", "watcher", "me ...3Koome", "older", "new"]
    document = plan_document(planned(graph, peers))
    assert {"peer": "watcher", "reason": "takes no stages"} in document["left_out"]
    assert {"peer": "older", "reason": "understands runs of a different version"} in document["left_out"]
    assert "new" not in {row["peer"] for row in document["left_out"]}


def test_losing_the_fast_peer_makes_a_plan_slower(graph: Graph, peers: Peers) -> None:
    before = planned(graph, peers).samples_per_second
    assert planned(graph, what_if(peers, "lose=lab-1")).samples_per_second < before
    assert planned(graph, what_if(peers, "add=8GB@900GFLOPS@1Gbit")).samples_per_second > before


def test_latency_plans_use_the_fastest_path_and_energy_the_least_power(graph: Graph, peers: Peers) -> None:
    quick = planned(graph, peers, objective="latency")
    assert quick.peers_of(0) == ("lab-1",)
    thrifty = planned(graph, peers, objective="energy")
    for stage in range(len(thrifty.split.groups)):
        assert "mbp" not in thrifty.peers_of(stage)


def test_an_infeasible_plan_states_what_is_missing_and_the_remedy(graph: Graph, tmp_path: Path) -> None:
    file = tmp_path / "peers.toml"
    file.write_text('[[peers]]\nname = "a"\nmemory = "200MB"\nrate = "1GFLOPS"\n')
    with pytest.raises(Infeasible) as refused:
        planned(graph, read_peers(str(file)))
    assert "1 peer offers 0.20 GB" in str(refused.value)
    assert refused.value.do.startswith("free ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[peers]]\nname = "a"\nmemory = "8"\nrate = "1GFLOPS"\n', "memory 8: want an amount such as 12GB"),
        ('[[peers]]\nname = "a"\nmemory = "8GB"\nrate = "fast"\n', "rate fast: want a rate of computing"),
        ("", "peers"),
        ('[[peers]]\nname = "a"\nmemory = "8GB"\nrate = "1GFLOPS"\n' * 2, "two peers have the name 'a'"),
        (
            '[[peers]]\nname = "a"\nmemory = "8GB"\nrate = "1GFLOPS"\n'
            '[[links]]\nbetween = ["a", "b"]\nrate = "1Mbit"\n',
            "no peer has the name 'b'",
        ),
    ],
)
def test_an_error_in_a_file_of_peers_names_its_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "peers.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as refused:
        read_peers(str(file))
    assert words in str(refused.value)


@pytest.mark.parametrize("change", ["lose=x", "add=8GB", "add=1@2@3@4", "link=a@1Gbit", "nothing"])
def test_an_invalid_change_is_refused(peers: Peers, change: str) -> None:
    with pytest.raises(UsageError):
        what_if(peers, change)


def test_the_command_prints_a_plan_and_its_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], graph: Graph
) -> None:
    (tmp_path / "peers.toml").write_text(PEERS)
    (tmp_path / "toy.peerloom").write_bytes(encode_graph(graph))
    arguments = ["plan", str(tmp_path / "toy.peerloom"), "--peers", str(tmp_path / "peers.toml")]
    assert run([*arguments, "--svg", str(tmp_path / "plan.svg"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "peerloom/plan/1"
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")
    assert run([*arguments, "--what-if", "lose=lab-1"]) == 0
    assert "compared with the plan without" in capsys.readouterr().out
    assert run([*arguments, "--stages", "100"]) == 5
    assert run([*arguments, "--objective", "speed"]) == 2
    assert run([*arguments[:2], "--data-dir", str(tmp_path)]) == 3, (
        "the command found a node although none runs here"
    )


def test_the_command_plans_on_the_first_devices_that_suffice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], graph: Graph
) -> None:
    from partition.model.graph import encode_graph

    row = '[[peers]]\nname = "{}"\nmemory = "8GB"\nrate = "50GFLOPS"\ndevice = "{}"\n'
    rows = [row.format(name, kind) for name, kind in (("a", "cuda"), ("b", "cpu"), ("c", "mps"))]
    (tmp_path / "peers.toml").write_text("".join(rows))
    (tmp_path / "toy.peerloom").write_bytes(encode_graph(graph))
    words = ["plan", str(tmp_path / "toy.peerloom"), "--peers", str(tmp_path / "peers.toml")]
    words += ["--replicas", "1", "--json"]

    def holders(devices: str, stages: int) -> set[str]:
        assert run([*words, "--devices", devices, "--stages", str(stages)]) == 0
        document = json.loads(capsys.readouterr().out)
        return {name for stage in document["stages"] for name in stage["peers"]}

    assert holders("cuda,cpu", 1) == {"a"}
    assert holders("cuda,cpu", 2) == {"a", "b"}
    assert holders("mps,cuda,cpu", 2) == {"a", "c"}
    assert run([*words, "--devices", "cuda", "--stages", "2"]) == 5
    assert run([*words, "--devices", "gpu"]) == 2
    assert "want some of cuda, mps, cpu, each once" in capsys.readouterr().err


def test_every_plan_leaves_the_memory_that_a_process_needs(graph: Graph, peers: Peers) -> None:
    assert min(row.memory_bytes for row in planned(graph, peers).forecast.stages) > STAGE_BASELINE_BYTES


def test_plans_are_identical_in_all_processes_and_peer_orders(
    graph: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        f'[[peers]]\nname = "p{number}"\nmemory = "{0.6 + number % 3 * 0.2:.1f}GB"\n'
        f'rate = "{20 + 7 * (number % 5)}GFLOPS"\nlink = "{1 + number % 2}Gbit"\n'
        for number in range(9)
    ]
    links = [
        f'[[links]]\nbetween = ["p{number}", "p{number + 1}"]\nrate = "{50 + number}Mbit"\n'
        for number in range(8)
    ]
    (tmp_path / "toy.peerloom").write_bytes(encode_graph(graph))
    peers, command = tmp_path / "peers.toml", ["plan", str(tmp_path / "toy.peerloom"), "--json", "--peers"]
    peers.write_text("".join([*rows, *links]))
    assert run([*command, str(peers)]) == 0
    random = Random(1)
    random.shuffle(rows)
    random.shuffle(links)
    peers.write_text("".join([*rows, *links]))
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-m", "node", *command, str(peers)],
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed},
        text=True,
        timeout=120,
    )
    assert done.stdout == capsys.readouterr().out


# The library

TWO = """
[[peers]]
name = "one"
memory = "8GB"
rate = "50GFLOPS"

[[peers]]
name = "two"
memory = "8GB"
rate = "50GFLOPS"
"""


def test_a_plan_needs_no_node_and_no_torch(tmp_path: Path) -> None:
    file = tmp_path / "PEERS.toml"
    file.write_text(TWO)
    report = node.plan(simple_cnn("float32").graph, file, batch=32)
    assert report.samples_per_second > 0
    assert node.plan(simple_cnn("float32").graph, read_peers(str(file)), batch=32) == report
    assert node.plan(simple_cnn("float32").graph, file, batch=32, what_if="lose=two").left_out == ()
    with pytest.raises(UsageError, match="objective"):
        node.plan(simple_cnn("float32").graph, file, objective="speed")
    with pytest.raises(UsageError, match="simple-cnn"):
        node.plan("simple-cn", file)
    with pytest.raises(RunFailed, match="simple-cnn"):
        node.plan(simple_cnn("float32").graph, file, what_if="lose=one,lose=two")


def test_a_report_equals_the_commands_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = simple_cnn("float32").graph
    peers, file = tmp_path / "PEERS.toml", tmp_path / "toy.peerloom"
    peers.write_text(TWO)
    file.write_bytes(encode_graph(graph))
    report = node.plan(file, peers, batch=32, stages=2)
    command = ["plan", str(file), "--peers", str(peers), "--batch", "32", "--stages", "2"]
    assert run([*command, "--explain"]) == 0
    assert capsys.readouterr().out == report.explain() + "\n"
    assert run([*command, "--json"]) == 0
    assert capsys.readouterr().out == report.to_json() + "\n"
    assert run([*command, "--svg", str(tmp_path / "plan.svg")]) == 0
    assert (tmp_path / "plan.svg").read_text() == report.to_svg()
    predicted, document = report.predicted, json.loads(report.to_json())
    assert predicted.samples_per_second == document["samples_per_second"] == report.samples_per_second
    assert predicted.step_seconds == pytest.approx(32 / predicted.samples_per_second)
    assert list(predicted.memory_bytes) == [stage["memory_bytes"] for stage in document["stages"]]
    assert predicted.tokens_per_second is None
    assert 0 <= predicted.bubble < 1


def test_a_what_if_may_have_one_change_or_several(tmp_path: Path) -> None:
    graph = simple_cnn("float32").graph
    file = tmp_path / "PEERS.toml"
    file.write_text(TWO)
    changes = ["lose=two", "add=8GB@500GFLOPS@1Gbit"]
    report = node.plan(graph, file, what_if=changes)
    assert report == node.plan(graph, file, what_if=",".join(changes))
    without = node.plan(graph, file)
    assert report.without == without.predicted
    assert report.what_if_gain == pytest.approx(report.samples_per_second / without.samples_per_second - 1)
    assert without.what_if_gain is None
    assert report.what_if_gain is not None
    told = f"with {','.join(changes)}: {report.what_if_gain * 100:+.0f} % compared with the plan without"
    assert told in report.explain().splitlines()


def test_an_added_peer_may_make_a_plan_possible(tmp_path: Path) -> None:
    graph = simple_cnn("float32").graph
    file = tmp_path / "PEERS.toml"
    file.write_text('[[peers]]\nname = "small"\nmemory = "0.1GB"\nrate = "50GFLOPS"\n')
    with pytest.raises(RunFailed):
        node.plan(graph, file)
    report = node.plan(graph, file, what_if="add=8GB@50GFLOPS")
    assert report.without is None
    assert "with add=8GB@50GFLOPS: nothing fits without" in report.explain()


def test_layers_are_kept_together_on_request(
    graph: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peers, file = tmp_path / "PEERS.toml", tmp_path / "toy.peerloom"
    peers.write_text(TWO)
    file.write_bytes(encode_graph(graph))
    apart = node.plan(graph, peers, stages=2)
    ends = [last for _, last in apart.split.ranges[:-1]]
    around = f"{ends[0] - 1}-{ends[0]}"
    kept = node.plan(graph, peers, stages=2, together=[[around]])
    assert kept.split.ranges != apart.split.ranges
    assert kept.split.ranges[0][1] not in ends
    with pytest.raises(RunFailed, match="stay together"):
        node.plan(graph, peers, stages=2, keep_tied=True)
    with pytest.raises(UsageError, match=r"no module and no layer 'h\.77'"):
        node.plan(graph, peers, together=[["h.77"]])
    command = ["plan", str(file), "--peers", str(peers), "--stages", "2"]
    assert run([*command, "--together", around, "--json"]) == 0
    assert [stage["first_layer"] for stage in json.loads(capsys.readouterr().out)["stages"]] == [
        first for first, _ in kept.split.ranges
    ]
    assert run([*command, "--keep-tied"]) == 5


def test_every_stage_gets_at_least_the_requested_replicas(graph: Graph, tmp_path: Path) -> None:
    file = tmp_path / "PEERS.toml"
    file.write_text(TWO)
    report = node.plan(graph, file, replicas_min=2)
    assert [len(group) for group in report.split.groups] == [2]
    with pytest.raises(RunFailed, match="4 peers are needed"):
        node.plan(graph, file, stages=2, replicas_min=2)


@pytest.mark.slow
def test_a_hugging_face_folder_is_planned_without_its_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    model = tmp_path / "tiny-llama"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY_LLAMA))
    (tmp_path / "PEERS.toml").write_text(TWO)
    command = ["plan", str(model), "--peers", str(tmp_path / "PEERS.toml"), "--json"]
    assert run(command) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["model"] == str(model)
    assert document["tokens_per_second"] == pytest.approx(32 * document["samples_per_second"])


TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}


def test_the_example_compares_changes_to_its_own_machines(graph: Graph, tmp_path: Path) -> None:
    file = tmp_path / "toy.peerloom"
    file.write_bytes(encode_graph(graph))
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "plan.py"), str(file)],
        capture_output=True,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        timeout=120,
    )
    lines = done.stdout.splitlines()
    assert lines[0].startswith("STAGE")
    assert [line.split(":")[0] for line in lines[-3:]] == [
        "lose=lab-3",
        "add=8GB@50GFLOPS@1Gbit",
        "lose=lab-3 and link=lab-1",
    ]
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")


def test_a_separate_process_captures_a_named_model() -> None:
    assert graph_of("simple-cnn").name == "simple-cnn"


def test_a_node_plans_over_its_swarm() -> None:
    async def scenario() -> None:
        async with swarm("ab") as group:
            me, graph = group.nodes["a"], simple_cnn("float32").graph
            report = await me.plan(graph, stages=2, what_if=["lose=b", "add=8GB@1GFLOPS"])
            assert len(report.split.groups) == 2
            assert {peer.name for peer in report.problem.peers} == {"a", "new-2"}
            # The pure function returns the same plan for the same peers.
            measured = await me.measurements.document(me.membership.live)
            peers = live_peers(me.status(), peers_document(me.state, 0.0), measured)
            alone = node.plan(graph, peers, stages=2, what_if=["lose=b", "add=8GB@1GFLOPS"])
            assert alone.to_json() == report.to_json()

    simulate(scenario)


def test_live_peers_have_their_metered_or_assumed_power() -> None:
    peers = {name: PeerId(bytes([number]) * 32) for number, name in enumerate("abc", 1)}

    def row(name: str) -> dict[str, object]:
        capacity = {"memory_free_bytes": 8 * 10**9, "flops_per_second": 6e10, "location": "", "device": "cpu"}
        return {"name": name, "peer": peer_text(peers[name]), "status": "alive", "capacity": capacity}

    metered = replace(assumed(6 * 10**10), busy_milliwatts=65_000, idle_milliwatts=5_000)
    absurd = replace(assumed(6 * 10**10), busy_milliwatts=0, idle_milliwatts=5_000)
    known = Knowledge(peers["a"], {peers["b"]: metered, peers["c"]: absurd}, {})
    document = json.loads(json.dumps(measurements_document(known, list(peers.values()))))
    found = live_peers(row("a"), {"peers": [row("b"), row("c")]}, document)
    usual = (BUSY_MILLIWATTS, IDLE_MILLIWATTS)
    assert [(peer.busy_milliwatts, peer.idle_milliwatts) for peer in found.peers] == [
        usual,
        (65_000, 5_000),
        usual,
    ]


def test_measurements_replace_assumptions_about_live_peers() -> None:
    peers = {name: PeerId(bytes([number]) * 32) for number, name in enumerate("abc", 1)}

    def row(name: str) -> dict[str, object]:
        capacity = {"memory_free_bytes": 8 * 10**9, "flops_per_second": 6e10, "location": "", "device": "cpu"}
        return {"name": name, "peer": peer_text(peers[name]), "status": "alive", "capacity": capacity}

    own = assumed(3 * 10**10)
    observed = Observed(
        (LinkRow(peers["b"], 2_500_000, 5_000_000, 10_000_000),), (StageRow(peers["c"], 6 * 10**9),)
    )
    working = replace(own, node=OperatorPace(2_000, 0, 0))
    known = Knowledge(peers["a"], {peers["a"]: working, peers["b"]: working}, {peers["a"]: observed})
    document = json.loads(json.dumps(measurements_document(known, list(peers.values()))))
    found = live_peers(row("a"), {"peers": [row("b"), row("c")]}, document)
    assert found.is_measured
    assert found.link("a", "b") == Link(2_500_000, 10_000_000)
    assert found.link("b", "a") == Link(5_000_000, 10_000_000)
    assert found.link("a", "c") == Link()
    assert [peer.calibration for peer in found.peers[:2]] == [working.as_requester(), working]
    rates = [peer.calibration.flops_per_second for peer in found.peers]
    assert rates == pytest.approx([3e10, 3e10, 6e9], rel=0.01)
