"""Graphs and initial values are transferred between nodes, and a RUN.toml becomes a manifest.

Whole simulated nodes; the graphs are small and written by hand.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import trio

from crypto.encoding import encode
from crypto.facts import IdentitySigner
from crypto.identity import Identity
from node import toml
from node.cli.capture import captured
from node.commands import Commands
from node.content import graphs
from node.content.datasets import Dataset, labelled, load_digits, load_text
from node.content.graphs import GraphSettings, graph_name, values_name
from node.errors import StageFailed, Unreachable, UsageError
from node.protocols import calls
from node.protocols import runs as wire
from node.protocols.manifest import MANIFEST_BYTES_MAX, Manifest, make_run
from node.protocols.run_file import RunFile, check_run_file
from node.runs.manifest_builder import WINDOW, bind_data, make_manifest, window_of
from node.runs.settings import RunServiceSettings
from node.runtime import Node
from node.service_settings import ServiceSettings
from partition.model.graph import DataType, Graph, StoredValues, decode_graph, encode_graph, graph_hash
from partition.run.asks import Declined
from partition.stage import GROUPS_MAX, GroupSettings, StageSpecification
from tests.partition.graphs import GraphBuilder
from tests.stack import Model, Swarm, manifest, prepare, simple_cnn, simulate, swarm

NAME = "RUN.toml"


def classifier(
    *sides: int, dtype: DataType = "float32", metrics: bool = True, second_input: bool = False
) -> Graph:
    """Return a graph with one linear layer, on samples of this shape, and three classes."""
    build = GraphBuilder("linear", "float32")
    rows = build.symbol("batch", 1, 64)
    build.begin()
    x = build.input("x", dtype, rows, *sides)
    if second_input:
        build.input("more", dtype, rows)
    y = build.label("y", "int64", rows)
    inner = build.node("flatten.using_ints", x, 1)
    weight, bias = build.parameter("fc.weight", 3, int(np.prod(sides))), build.parameter("fc.bias", 3)
    logits = build.node("linear", inner, weight, bias)
    loss = build.node("cross_entropy_loss", logits, y, None, 2)
    right = build.node("sum", build.node("eq.Tensor", build.node("argmax", logits, 1), y))
    build.end(outputs=[logits], loss=loss, metrics={"correct": right} if metrics else None)
    return build.finish()


def tokens(length: int | None) -> Graph:
    """Return a graph with an embedding and a head, for sequences of one length, or of up to 100."""
    build = GraphBuilder("tokens", "float32")
    rows = build.symbol("batch", 1, 64)
    side: Any = build.symbol("sequence", 1, 100) if length is None else length
    build.begin()
    x, y = build.input("x", "int64", rows, side), build.label("y", "int64", rows, side)
    table = build.parameter("table.weight", 256, 8)
    logits = build.node("linear", build.node("embedding", table, x), build.parameter("head.weight", 256, 8))
    flat, wanted = build.node("view", logits, [-1, 256]), build.node("view", y, [-1])
    build.end(outputs=[logits], loss=build.node("cross_entropy_loss", flat, wanted, None, 2))
    return build.finish()


def model_of(graph: Graph) -> Model:
    data = encode_graph(graph)
    return Model(graph, data, graph_hash(data))


def two_nodes(scenario: Callable[[Swarm, Node, Node], Awaitable[None]], **limits: int) -> None:
    settings = ServiceSettings(run_service=RunServiceSettings(graphs=GraphSettings(**limits)))

    async def main() -> None:
        async with swarm("ab", settings=settings) as group:
            await scenario(group, group.nodes["a"], group.nodes["b"])

    simulate(main)


# Graphs


def test_a_graph_is_fetched_once_and_kept_on_disk() -> None:
    async def scenario(group: Swarm, a: Node, b: Node) -> None:
        model = model_of(classifier(8))
        model.put(b)
        assert await a.runs.models.get(model.hash, [b.peer]) == model.graph
        group.kill("b")
        assert await a.runs.models.get(model.hash, [b.peer]) == model.graph
        a.runs.models._decoded.clear()
        assert await a.runs.models.get(model.hash, []) == model.graph, "the graph is not on the disk"

    two_nodes(scenario)


def test_a_graph_that_does_not_match_its_hash_is_rejected() -> None:
    async def scenario(_: Swarm, a: Node, b: Node) -> None:
        model, other = model_of(classifier(8)), model_of(classifier(9))
        b.seams.storage.write(graph_name(model.hash), other.data)
        with pytest.raises(Unreachable, match="the requested hash"):
            await a.runs.models.get(model.hash, [b.peer])
        broken = msgspec.structs.replace(model.graph, operators=("aten.no_such_thing.default",))
        bad = model_of(broken)
        bad.put(b)
        with pytest.raises(Unreachable, match=r"aten\.no_such_thing"):
            await a.runs.models.get(bad.hash, [b.peer])
        with pytest.raises(Unreachable, match="not here"):
            await a.runs.models.get(bytes(32), [b.peer, a.peer])
        assert await a.runs.models.read(model.hash) is None

    two_nodes(scenario)


def test_an_oversized_graph_is_refused_before_it_is_received() -> None:
    async def scenario(_: Swarm, a: Node, b: Node) -> None:
        model = model_of(classifier(8))
        model.put(b)
        with pytest.raises(Unreachable, match="at most 100 are wanted"):
            await a.runs.models.get(model.hash, [b.peer])

    two_nodes(scenario, graph_bytes_max=100)


def test_fetches_of_one_graph_are_shared_and_limited() -> None:
    async def scenario(_: Swarm, a: Node, b: Node) -> None:
        model = model_of(classifier(8))
        model.put(b)
        asked: list[object] = []
        answer = b.runs._requests.answer

        async def count(peer: Any, request: Any) -> Any:
            asked.append(request)
            return await answer(peer, request)

        b.runs._requests.answer = count  # type: ignore[method-assign]  # counts what comes in
        async with trio.open_nursery() as nursery:
            for _each in range(5):
                nursery.start_soon(a.runs.models.get, model.hash, [b.peer])
        assert asked == [wire.FetchModel(model.hash)]
        refused = 0

        async def want(number: int) -> None:
            nonlocal refused
            with pytest.raises(Unreachable) as error:
                await a.runs.models.get(bytes([number]) * 32, [b.peer])
            refused += "busy" in error.value.detail

        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(want, number)
        assert refused >= 10 - graphs.FETCHES_MAX - 1
        assert a.runs.models._fetching == {}

    two_nodes(scenario)


def test_the_least_recently_used_graphs_are_evicted() -> None:
    async def scenario(_: Swarm, a: Node, b: Node) -> None:
        several = [model_of(classifier(side)) for side in (2, 3, 4)]
        for model in several:
            model.put(b)
            await a.runs.models.get(model.hash, [b.peer])
        here = [await a.runs.models.read(model.hash) is not None for model in several]
        assert here == [False, True, True]

    two_nodes(scenario, kept_max=2)


def test_the_graph_of_a_local_run_is_never_evicted() -> None:
    async def scenario(_: Swarm, a: Node, b: Node) -> None:
        several = [model_of(classifier(side)) for side in (2, 3, 4, 5)]
        ours = several[0]
        run = make_run(a.signer, manifest(ours))
        a.runs.accept(run)
        for model in several:
            model.put(b)
            await a.runs.models.get(model.hash, [b.peer])
        here = [await a.runs.models.read(model.hash) is not None for model in several]
        assert here == [True, False, True, True], (
            "the run's graph was evicted, or not as many others stayed as the limit allows"
        )

    two_nodes(scenario, kept_max=2)


def test_a_file_beside_a_graph_without_values_is_not_read(tmp_path: Path) -> None:
    """The file may be the result of a run, or anything else, and other peers may fetch what the node
    loads."""
    model = model_of(classifier(8))
    graph, values = tmp_path / "linear.peerloom", tmp_path / "linear.safetensors"
    graph.write_bytes(model.data)
    values.write_bytes(b"\xff" * 64)

    async def scenario(_: Swarm, a: Node, b: Node) -> None:
        name, _graph = await a.runs.models.learn(graph, values)
        assert await a.runs.models.read(name) == model.data
        assert await a.runs.models.read_range(name, 0, 1) is None

    two_nodes(scenario)


# Initial values


def with_values() -> Model:
    """Return the same model with its weight in a file."""
    from partition.model.safetensors_layout import file_header

    graph = classifier(8)
    values = np.arange(24, dtype="<f4")
    row = graph.parameters[0]
    digest = graph_hash(values.tobytes())
    stored = msgspec.structs.replace(row, source=StoredValues(0, values.nbytes, digest))
    graph = msgspec.structs.replace(graph, parameters=(stored, *graph.parameters[1:]))
    made = model_of(graph)
    return Model(graph, made.data, made.hash, file_header(graph) + values.tobytes())


class Arena:
    """Stands for a stage; it has only parameters."""

    def __init__(self) -> None:
        self.parameters = bytearray(27 * 4)
        self.asked: list[object] = []

    async def call(self, request: object) -> object:
        self.asked.append(type(request).__name__)
        return None

    def vector(self, name: str) -> memoryview:
        assert name == "parameters"
        return memoryview(self.parameters)

    async def aclose(self) -> None:
        return


def specification_of(model: Model) -> StageSpecification:
    from partition.model.cut import cut_layers

    (stage,) = cut_layers(model.graph, model.hash, [(0, len(model.graph.layers))])
    return StageSpecification(run=b"run", graph=stage, sizes_max=(4,))


def test_initial_values_are_fetched_in_ranges_and_checked() -> None:
    async def scenario(_: Swarm, a: Node, b: Node) -> None:
        model = with_values()
        specification = specification_of(model)
        model.put(b)
        stage = Arena()
        await a.runs.models.fill(stage, specification, [b.peer])
        assert np.array_equal(np.frombuffer(stage.parameters, "<f4")[:24], np.arange(24))
        assert stage.asked == ["Reload"]
        assert model.values is not None
        b.seams.storage.write(values_name(model.hash), model.values[:-1] + b"\7")
        with pytest.raises(StageFailed, match="differs from the graph"):
            await a.runs.models.fill(Arena(), specification, [b.peer])
        b.seams.storage.write(values_name(model.hash), model.values[:-1])
        with pytest.raises(StageFailed, match="did not arrive in time"):
            await a.runs.models.fill(Arena(), specification, [b.peer])

    two_nodes(scenario, range_bytes_max=40)


def test_a_range_outside_the_file_or_too_long_gets_no_answer() -> None:
    async def scenario(_: Swarm, a: Node, b: Node) -> None:
        model = with_values()
        model.put(a)
        reply = await calls.ask(b.network, a.peer, wire.FetchRange(model.hash, 90, 10), seconds=30)
        assert isinstance(reply, Declined)
        assert await calls.fetch(b.network, a.peer, wire.FetchRange(model.hash, 4, 4), seconds=30) == (
            np.ones(1, "<f4").tobytes()
        )
        stream = await b.network.open(a.peer, wire.RUNS_PROTOCOL)
        before = a.counters.get("protocol_errors", 0)
        await stream.send(encode(wire.FetchRange(model.hash, 0, wire.RANGE_BYTES_MAX + 1)))
        await trio.sleep(1)
        assert a.counters["protocol_errors"] == before + 1

    two_nodes(scenario)


# From RUN.toml to a manifest


def run_file(text: str = "") -> RunFile:
    return toml.parse(f"model = 'x.peerloom'\n{text}", RunFile, name=NAME).value


def test_sizes_are_inferred_from_fitting_data() -> None:
    assert bind_data(classifier(1, 8, 8), load_digits(), 16, NAME) == (16,)
    wanted = make_manifest(run_file(), classifier(1, 8, 8), bytes(32), load_digits(), name=NAME, created=1.5)
    assert (wanted.model, wanted.sizes_max, wanted.metrics) == ("linear", (16,), ("correct",))


def test_more_stages_than_layers_are_refused_before_any_request() -> None:
    model, data = simple_cnn("float32"), load_digits()
    wanted = run_file("[plan]\nstages = 6")
    with pytest.raises(UsageError, match=r"plan\.stages 6: the model can only be cut between its 5 layers"):
        make_manifest(wanted, model.graph, model.hash, data, name=NAME, created=1.5)


def test_layers_to_keep_together_become_ranges_in_the_manifest() -> None:
    model, data = simple_cnn("float32"), load_digits()

    def made(text: str) -> Manifest:
        wanted = run_file(f"[train]\nmicrobatch = 8\n[plan]\n{text}")
        return make_manifest(wanted, model.graph, model.hash, data, name=NAME, created=1.5)

    assert made("").together == ()
    assert made('together = [["0-1"], ["1", "2"]]\nreplicas_min = 3').together == ((0, 3),)
    assert made("replicas_min = 3").replicas_min == 3
    assert made("keep_tied = true").together == (), (
        "simple-cnn has layers that are kept together without a wish"
    )
    with pytest.raises(
        UsageError, match=r"RUN\.toml: plan\.together: there is no module and no layer 'h\.0'"
    ):
        made('together = [["h.0"]]')


def test_a_hugging_face_folder_is_trained_from_its_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "tiny")
    wanted = msgspec.structs.replace(run_file(), model="tiny", options={"length": 8})
    with captured(wanted, tmp_path / "RUN.toml", NAME) as found:
        graph = decode_graph(Path(found["graph"]).read_bytes())
        assert Path(found["values"]).is_file()
        text = Dataset(
            "text",
            *(({"x": np.zeros((4, 8), np.int64), "y": np.zeros((4, 8), np.int64)},) * 2),
        )
        assert bind_data(graph, text, 2, NAME) == (2,)
    with (
        pytest.raises(UsageError, match="no model is called 'tine'"),
        captured(msgspec.structs.replace(run_file(), model="tine"), tmp_path / "RUN.toml", NAME),
    ):
        pass


def test_a_renamed_key_is_refused_with_its_new_name() -> None:
    with pytest.raises(UsageError, match=r"unknown key 'compress' in \[train\]: it is 'frames' now"):
        run_file("[train]\ncompress = false")


def test_a_runs_random_draws_do_not_depend_on_its_shape() -> None:
    wanted = make_manifest(run_file(), classifier(1, 8, 8), bytes(32), load_digits(), name=NAME, created=1.5)
    signer = IdentitySigner(Identity(b"r" * 32), "test")

    def key(**changes: Any) -> bytes:
        return make_run(signer, msgspec.structs.replace(wanted, **changes)).random_key

    shapes: tuple[dict[str, Any], ...] = (
        {"stages": 3, "replicas": 2, "trainers": 2},
        {"together": ((0, 2),), "replicas_min": 2},
        {"frames": "int8", "pipeline": "gpipe", "recompute": True},
        {"save_every": 7, "on_lost_quorum": "fork", "created_milliseconds": 9, "model": "other"},
    )
    assert {key(**change) for change in shapes} == {key()}
    others: tuple[dict[str, Any], ...] = (
        {"seed": 1},
        {"graph": "1" * 64},
        {"data": "1" * 64},
        {"microbatch": 8},
        {"microbatches": 2},
        {"autocast": "bfloat16"},
        {"steps": 3},
    )
    assert key() not in [key(**change) for change in others]


def data_of(x: Any, y: Any) -> Dataset:
    return labelled("0" * 64, (x, y), (x, y))


@pytest.mark.parametrize(
    ("graph", "x", "words"),
    [
        (classifier(8), np.zeros((4, 1, 8, 8)), "takes samples x of 8, the data's are 1x8x8"),
        (classifier(3, 8, 8), np.zeros((4, 1, 8, 8)), "takes samples x of 3x8x8, the data's are 1x8x8"),
        (classifier(8, dtype="int64"), np.zeros((4, 8)), "takes x of int64, the data's are float64"),
        (classifier(8, second_input=True), np.zeros((4, 8)), "takes x, more, y; the data has x, y"),
    ],
    ids=["dimensions", "sides", "types", "inputs"],
)
def test_data_that_does_not_fit_the_model_is_explained(graph: Graph, x: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        bind_data(graph, data_of(x, np.zeros(4, np.int64)), 4, NAME)


def test_a_micro_batch_outside_the_captured_range_is_explained() -> None:
    with pytest.raises(UsageError, match="the model takes 1 to 64 samples at once"):
        bind_data(classifier(8), data_of(np.zeros((99, 8)), np.zeros(99, np.int64)), 65, NAME)


def test_the_user_or_the_model_sets_the_window_of_a_text(tmp_path: Path) -> None:
    assert window_of(run_file("[train]\nwindow = 9"), tokens(12), NAME) == 9
    assert window_of(run_file(), tokens(12), NAME) == 12
    assert window_of(run_file(), tokens(None), NAME) == WINDOW
    path = tmp_path / "text"
    path.write_bytes(bytes(range(200)))
    assert bind_data(tokens(None), load_text(path, window=20), 4, NAME) == (4, 20)
    with pytest.raises(UsageError, match="takes samples x of 12, the data's are 20"):
        bind_data(tokens(12), load_text(path, window=20), 4, NAME)


def test_a_model_without_a_loss_cannot_be_trained() -> None:
    graph = classifier(1, 8, 8)
    entry = msgspec.structs.replace(graph.entries[0], name="forward", loss=None, labels=(), metrics=())
    with pytest.raises(UsageError, match="without a loss"):
        bind_data(msgspec.structs.replace(graph, entries=(entry,)), load_digits(), 4, NAME)


def test_frames_are_exact_unless_the_user_allows_loss() -> None:
    assert run_file("").train.frames == "exact"
    assert run_file("[train]\nframes = 'int8'").train.frames == "int8"
    with pytest.raises(UsageError, match=r'train\.frames = "int7": want one of "bfloat16", "exact"'):
        run_file("[train]\nframes = 'int7'")


def test_the_largest_optimizer_settings_fit_a_manifest() -> None:
    async def scenario(_: Swarm, a: Node, b: Node) -> None:
        optimizer = run_file(
            "[train]\noptimizer='adamw'\nschedule='cosine'\nwarmup_steps=10\nclip_norm=1.5\nmomentum=0.3"
        ).optimizer
        groups = tuple(GroupSettings(0.1 * number, 0.01 * number) for number in range(GROUPS_MAX))
        wanted = manifest(
            simple_cnn(),
            model="m" * 40,
            data="f" * 64,
            steps=10_000_000,
            sizes=(2**31 - 1,) * 7,
            seed=2**53 - 1,
            metrics=("correct", "top-five"),
            optimizer=msgspec.structs.replace(optimizer, groups=groups),
            created_milliseconds=2**53 - 1,
        )
        assert len(prepare(b, wanted).fact.body) <= MANIFEST_BYTES_MAX
        with pytest.raises(Exception, match="at most 900"):
            prepare(b, msgspec.structs.replace(wanted, metrics=tuple("m" * 39 + x for x in "abcdefghij")))

    two_nodes(scenario)


def test_a_schedule_that_consists_only_of_warm_up_is_refused() -> None:
    wanted = run_file("[train]\nsteps = 5\nwarmup_steps = 5\nschedule = 'linear'")
    with pytest.raises(UsageError, match="leaves no step"):
        check_run_file(wanted, NAME)


# The command


def test_an_unknown_model_name_lists_the_known_ones(tmp_path: Path) -> None:
    wanted = toml.parse("model = 'simple-cn'", RunFile, name=NAME).value
    with pytest.raises(UsageError) as error, captured(wanted, tmp_path / NAME, NAME):
        pass
    assert "did you mean 'simple-cnn'?" in error.value.what
    ways = "a captured FILE.peerloom; PATH.py:FUNCTION; or a Hugging Face folder"
    assert error.value.do == f"gpt, resnet18, simple-cnn; {ways}"


OWN = """
import torch
from torch import nn
from partition.capture import Task


def build(hidden=8):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, hidden), nn.Linear(hidden, 256))
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    return Task(
        model,
        (tokens,),
        (tokens,),
        lambda output, target: (
            nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"),
            torch.ones_like(target).sum(),
        ),
        name="own",
    )
"""


def test_a_users_function_and_text_become_a_run_that_trains(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "text.txt").write_text("to and fro and " * 40)
    text = (
        "model = 'own.py:build'\ndata = 'text.txt'\n[options]\nhidden = 4\n"
        "[train]\nsteps = 30\nbatch = 8\nmicrobatch = 4\nlearning_rate = 0.05\n"
        "[plan]\nstages = 2\nreplicas = 1\n"
    )
    wanted = toml.parse(text, RunFile, name=NAME).value
    seen: list[dict[str, Any]] = []

    async def scenario() -> None:
        async with swarm("abc", preset="lan") as group:

            async def emit(event: object) -> None:
                seen.append(event)  # type: ignore[arg-type]  # documents of events

            with captured(wanted, tmp_path / NAME, NAME) as files:
                assert files["values"].endswith(".safetensors"), (
                    "the run did not get initial values of its own"
                )
                arguments = {"text": text, "path": str(tmp_path / NAME), "name": NAME, **files}
                result = await Commands(group.nodes["c"]).handlers["train"](arguments, emit)
            assert isinstance(result, dict)
            assert (result["model"], result["status"], result["accuracy"]) == ("own", "done", None)
            assert result["loss_held_out"] < seen_losses(seen)[0] / 2

    simulate(scenario)


def seen_losses(events: list[dict[str, Any]]) -> list[float]:
    return [event["loss"] for event in events if event["kind"] == "StepCommitted"]


def test_a_captured_file_without_its_initial_values_is_explained(tmp_path: Path) -> None:
    model = with_values()
    (tmp_path / "m.peerloom").write_bytes(model.data)
    wanted = toml.parse("model = 'm.peerloom'", RunFile, name=NAME).value

    async def scenario(_: Swarm, a: Node, b: Node) -> None:
        async def emit(_: object) -> None:
            return

        with captured(wanted, tmp_path / NAME, NAME) as files:
            arguments = {"text": "model = 'm.peerloom'", "path": str(tmp_path / NAME), "name": NAME, **files}
            with pytest.raises(UsageError, match=r"should be in .*m.safetensors"):
                await Commands(a).handlers["train"](arguments, emit)
            (tmp_path / "m.peerloom").write_bytes(b"something else")
            with pytest.raises(UsageError, match="is not a trainable graph"):
                await Commands(a).handlers["train"](arguments, emit)

    two_nodes(scenario)
