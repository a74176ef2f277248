"""Each key of RUN.toml and node.toml, and each flag, changes something observable, or is refused in that
mode.

The settings declare the keys: a key without a row in a table here fails the test. A row is a value other than
the default, and the keys that it needs. In each mode either the submitted run (its manifest, its model, when
it is to be placed) differs with the row, or `train` refuses the key.
"""

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import typer

from node import toml
from node.cli.capture import captured, prepare_data
from node.config import RULES, Config, SettingRule, resolve
from node.config_file import ConfigFile
from node.content import datasets
from node.content.datasets import Dataset
from node.errors import UsageError
from node.main import app, run
from node.protocols.manifest import Manifest
from node.protocols.run_file import RunFile, check_run_file
from node.protocols.run_keys import EXACT_ONLY, LOCAL_ONLY
from node.runs.manifest_builder import make_manifest, window_of
from partition.model.graph import decode_graph
from sim.cli import app as simulator
from tests.source import sources

pytest.importorskip("sklearn")

MODES = ("exact", "local")
MODEL = '"simple-cnn"'

SMALL_GPT = {"model": '"gpt"', "options": "{layers = 1, heads = 1, width = 16}", "data": '"words.txt"'}

RUN_KEYS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "model": ('"resnet18"', {}),
    "data": ('"rows.npz"', {}),
    "options": ("{width = 4}", {"model": '"tied.py:build"', "data": '"words.txt"'}),
    "tokenizer": ('"tokenizer.json"', SMALL_GPT),
    "train.steps": ("7", {}),
    "train.epochs": ("2", {}),
    "train.batch": ("64", {}),
    "train.microbatch": ("32", {}),
    "train.window": ("32", SMALL_GPT),
    "train.optimizer": ('"sgd"', {}),
    "train.learning_rate": ("0.5", {}),
    "train.momentum": ("0.5", {"train.optimizer": '"sgd"'}),
    "train.weight_decay": ("0.5", {}),
    "train.schedule": ('"cosine"', {}),
    "train.warmup_steps": ("3", {}),
    "train.clip_norm": ("1.5", {}),
    "train.autocast": ('"bfloat16"', {}),
    "train.recompute": ("true", {}),
    "train.seed": ("9", {}),
    "train.dtype": ('"float64"', {}),
    "train.frames": ('"int8"', {}),
    "train.on_divergence": ('"continue"', {}),
    "train.groups": ('[{match = ["*bias*"], rate_factor = 0.5}]', {}),
    "train.mode": ("", {}),
    "train.federated": ("true", {}),
    "train.local_steps": ("7", {}),
    "train.strategy": ('"diloco"', {}),
    "train.codec": ('"int8"', {}),
    "train.damping": ("0.5", {}),
    "train.weighting": ('"equal"', {}),
    "train.aggregate": ('"median"', {}),
    "train.evaluate_every": ("3", {}),
    "train.patience": ("3", {"data": '"rows.npz"', "splits.validation_share": "0.2"}),
    "train.improvement": ("0.5", {"data": '"rows.npz"', "splits.validation_share": "0.2"}),
    "train.validate_every": ("3", {"data": '"rows.npz"', "splits.validation_share": "0.2"}),
    "train.watch": ('"accuracy"', {"data": '"rows.npz"', "splits.validation_share": "0.2"}),
    "train.keep": ('"best"', {"data": '"rows.npz"', "splits.validation_share": "0.2"}),
    "plan.stages": ("2", {}),
    "plan.replicas": ("2", {}),
    "plan.replicas_min": ("2", {}),
    "plan.standbys": ("1", {}),
    "plan.objective": ('"energy"', {}),
    "plan.together": ('[["0-1"]]', {"plan.stages": "2"}),
    "plan.keep_tied": ("true", {"model": '"tied.py:build"', "data": '"words.txt"', "plan.stages": "2"}),
    "plan.trainers": ("2", {}),
    "plan.pipeline": ('"gpipe"', {}),
    "plan.checkpoint_every": ("3", {}),
    "plan.on_lost_quorum": ('"fork"', {}),
    "plan.place": ('"berlin"', {}),
    "plan.near": ('"berlin"', {}),
    "plan.max_rtt_milliseconds": ("20", {}),
    "plan.devices": ('["cpu"]', {}),
    "plan.gflops_min": ("50", {}),
    "plan.priority": ("7", {}),
    "plan.deadline_minutes": ("9", {}),
    "goal.samples_per_second": ("100", {}),
    "goal.seconds": ("30", {"goal.samples_per_second": "100"}),
    "splits.validation": ('"other.npz"', {"data": '"rows.npz"'}),
    "splits.test": ('"other.npz"', {"data": '"rows.npz"'}),
    "splits.validation_share": ("0.2", {"data": '"rows.npz"'}),
    "splits.test_share": ("0.3", {"data": '"rows.npz"'}),
}
"""For each key: a value, and the other keys that it needs."""

REFUSED = {
    "exact": {*LOCAL_ONLY, "train.aggregate", "train.federated"},
    "local": {*EXACT_ONLY, "train.validate_every", "train.watch", "train.keep"},
}
"""For each mode: the keys that `train` refuses."""

TIED = """
import torch
from partition.capture import Task

class Tied(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding = torch.nn.Embedding(256, width)
        self.middle = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU())
        self.head = torch.nn.Linear(width, 256, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.middle(self.embedding(tokens)))

def build(width=8):
    tokens = torch.zeros((2, 64), dtype=torch.int64)
    loss = lambda output, target: torch.nn.functional.cross_entropy(
        output.reshape(-1, 256), target.reshape(-1), reduction="sum")
    return Task(Tied(width), example_inputs=(tokens,), labels=(tokens,), loss=loss)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the data and models that the rows name."""
    path = tmp_path_factory.mktemp("keys")
    draw = np.random.default_rng(1)
    for name, count in (("rows", 90), ("other", 40)):
        images = draw.normal(size=(count, 1, 8, 8)).astype(np.float32)
        np.savez(path / f"{name}.npz", x=images, y=np.arange(count) % 10)
    (path / "words.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    (path / "tied.py").write_text(TIED)
    _write_tokenizer(path / "tokenizer.json")
    return path


def _write_tokenizer(path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    known = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "fox": 1, "?": 2}, unk_token="?"))
    known.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    known.save(str(path))


def declared(kind: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """Yield the keys of a file; keys of its tables as `table.key`."""
    for field in msgspec.structs.fields(kind):
        if isinstance(field.default, msgspec.Struct):
            yield from declared(type(field.default), f"{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def run_text(keys: Mapping[str, str]) -> str:
    """Return a RUN.toml with these keys."""
    tables: dict[str, list[str]] = {"": []}
    for key, value in keys.items():
        table, _, name = key.rpartition(".")
        tables.setdefault(table, []).append(f"{name} = {value}")
    return "\n".join(
        line for table, lines in tables.items() for line in ([f"[{table}]"] if table else []) + lines
    )


@cache
def handed_on(text: str, folder: Path) -> tuple[Any, ...]:
    """Return the parts of a RUN.toml that others receive: the manifest, and when to place it. Raises
    UsageError.
    """
    wanted = toml.parse(text, RunFile, name="RUN.toml").value
    check_run_file(wanted, "RUN.toml")
    made = folder / f"made-{abs(hash(text))}"
    made.mkdir(exist_ok=True)
    if prepare_data(wanted, folder, made, "RUN.toml"):
        wanted = msgspec.structs.replace(wanted, data=str(made))
    graph_name, graph = _graph(wanted, folder)
    window = window_of(wanted, graph, "RUN.toml")
    dataset: Dataset = datasets.load(wanted.source, folder, window=window)
    manifest = make_manifest(wanted, graph, graph_name, dataset, name="RUN.toml", created=1.0)
    is_own = wanted.train.federated
    return manifest, wanted.plan.priority, wanted.plan.deadline_minutes, is_own, wanted.goal


_GRAPHS: dict[Any, tuple[bytes, Any]] = {}


def _graph(wanted: RunFile, folder: Path) -> tuple[bytes, Any]:
    """Capture a model once for all rows that name it."""
    from blake3 import blake3

    source = "" if wanted.model == "simple-cnn" and wanted.data == "digits" else wanted.data
    train = wanted.train
    key = wanted.model, source, str(wanted.options), train.dtype, train.groups, train.window, wanted.tokenizer
    if key not in _GRAPHS:
        with captured(wanted, folder / "RUN.toml", "RUN.toml") as files:
            data = Path(files["graph"]).read_bytes()
        _GRAPHS[key] = blake3(data).digest(), decode_graph(data)
    return _GRAPHS[key]


def test_every_key_of_a_run_has_a_row() -> None:
    assert set(declared(RunFile)) == set(RUN_KEYS)
    assert set().union(*REFUSED.values()) < set(RUN_KEYS)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("key", sorted(set(RUN_KEYS) - {"train.mode"}))
def test_each_key_of_a_run_has_an_effect_or_is_refused(key: str, mode: str, folder: Path) -> None:
    value, beside = RUN_KEYS[key]
    base = {"model": MODEL, **beside, "train.mode": f'"{mode}"'}
    if mode == "local" and key.startswith("plan.") and key != "plan.stages":
        base = {"plan.stages": "1"} | base
    if key in REFUSED[mode]:
        with pytest.raises(UsageError, match=rf"^RUN\.toml: {key}: "):
            handed_on(run_text(base | {key: value}), folder)
        return
    assert handed_on(run_text(base | {key: value}), folder) != handed_on(run_text(base), folder)


def test_the_mode_of_a_run_is_passed_on(folder: Path) -> None:
    found = [handed_on(run_text({"model": MODEL, "train.mode": f'"{mode}"'}), folder)[0] for mode in MODES]
    assert [manifest.local is None for manifest in found] == [True, False]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"train.strategy": '"diloco"'}, 'train.strategy: has no effect with train.mode = "exact"'),
        ({"train.damping": "0.5"}, 'train.damping: has no effect with train.mode = "exact"'),
        (
            {"train.mode": '"local"', "train.strategy": '"noloco"', "train.damping": "0.5"},
            "train.damping: noloco makes outer steps",
        ),
        ({"train.mode": '"local"', "train.damping": "0"}, "train.damping = 0"),
        ({"train.mode": '"local"', "plan.trainers": "2"}, "plan.trainers: has no effect"),
        ({"train.momentum": "0.9"}, 'train.momentum: has no effect with train.optimizer = "adam"'),
        ({"plan.replicas": "2", "plan.replicas_min": "2"}, "give one of the two"),
        ({"plan.objective": '"energy"', "plan.standbys": "1"}, "plan.standbys: has no effect"),
        ({"train.window": "9"}, "train.window: has no effect on digits"),
        ({"train.epochs": "0"}, "train.epochs = 0"),
        ({"model": '"my.peerloom"', "train.dtype": '"float64"'}, "captured already"),
        ({"model": '"my.peerloom"', "options": "{layers = 2}"}, "captured already"),
        ({"tokenizer": '"t.json"', "data": '"my.py:build"'}, "tokenizer: has no effect"),
    ],
)
def test_a_key_without_effect_is_refused(keys: Mapping[str, str], said: str, folder: Path) -> None:
    with pytest.raises(UsageError) as refused:
        handed_on(run_text({"model": MODEL, **keys}), folder)
    assert said in str(refused.value)


def test_train_refuses_a_key_without_effect_before_capture(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "dead.toml"
    file.write_text('model = "simple-cnn"\n[train]\nstrategy = "diloco"\n')
    assert run(["train", str(file), "--data-dir", str(folder)]) == UsageError.exit_code
    lines = capsys.readouterr().err.splitlines()
    assert "train.strategy: has no effect" in lines[0]
    assert 'train.mode = "local"' in lines[1]
    assert len(lines) == 2


def remedied(refused: UsageError) -> dict[str, str]:
    """Return the keys that the advice of a refusal sets; of several alternatives, the first."""
    first = re.split("[,;] or ", refused.do or "")[0]
    return dict(re.findall(r"(train\.\w+)(?: = | to at most )(\d+)", first))


@pytest.mark.parametrize("batch", [65, 4_096, 10_007, 1_048_576])
def test_following_the_remedies_for_a_large_batch_succeeds(batch: int, folder: Path) -> None:
    """Follow the remedies of refusals until the run is accepted."""
    keys = {"model": MODEL, "train.batch": str(batch), "train.microbatch": "1"}
    for _ in range(3):
        try:
            handed_on(run_text(keys), folder)
            return
        except UsageError as refused:
            keys |= remedied(refused)
    raise AssertionError(f"the advice contradicts itself: {keys}")


# Values that are passed on are also read


COPIERS = {"node/protocols/manifest.py", "node/runs/manifest_builder.py"}
"""Files that merely copy settings."""


def unread(names: set[str]) -> set[str]:
    """Return the names that the product reads as no attribute. Files without any of them are not parsed."""
    left = names
    for source in sources("node", "partition", "gossip"):
        if source.place not in COPIERS and any(f".{name}" in source.text for name in left):
            left = left - {each.attr for each in source.each(ast.Attribute) if isinstance(each.ctx, ast.Load)}
    return left


def test_each_field_of_a_manifest_is_read() -> None:
    assert unread({field.name for field in msgspec.structs.fields(Manifest)} - {"version"}) == set()


# node.toml, flags of a start, environment variables

NODE_KEYS = {
    "name": "lab-9",
    "data_dir": "elsewhere",
    "observer": "true",
    "join": "10.0.0.5:9747",
    "seed_files": "seeds.txt",
    "remember": "false",
    "lan": "false",
    "map": "false",
    "listen": "127.0.0.1:9001",
    "announce": "192.168.1.5:9747",
    "swarm": "other",
    "preset": "wan",
    "scope": "neighbourhood",
    "key_file": "swarm.key",
    "work_bits": "8",
    "device": "cuda:1",
    "memory": "12GB",
    "scratch": "1GB",
    "cores": "3",
    "location": "berlin",
    "accept_runs": "never",
    "slots": "3",
    "hours": "22:00-07:00",
    "idle": "10m",
    "load": "30%",
    "upload": "10Mbit/s",
    "download": "10Mbit/s",
    "disk": "1GB",
    "mains_only": "true",
    "battery_min": "30%",
    "battery_low": "less",
    "metered": "less",
    "peers": "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN",
    "runs": "0123456789abcdef",
    "peer_sessions": "3",
    "peer_tokens": "6000",
    "peer_cache": "30%",
    "own_data": "scans=/data/scans",
    "web": "off",
    "web_cert": "cert.pem",
    "web_proxy": "true",
    "log": "json",
    "log_levels": "runs=warning",
    "relay": "false",
    "relay_upload": "2Mbit/s",
    "relay_circuits": "7",
    "alert_webhook": "https://alerts.example/peerloom",
    "alert_command": "notify-send peerloom",
    "follow": "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN",
    "follow_allow": "hours",
    "allow_unfenced": "true",
    "calibrate": "false",
    "spare_process": "false",
}
"""For each setting: a value that is not its default."""


def test_every_key_of_node_toml_has_a_row() -> None:
    assert {".".join(rule.key) for rule in RULES} == set(declared(ConfigFile))
    assert {rule.name for rule in RULES} == set(NODE_KEYS)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_key_of_node_toml_and_its_variable_change_the_config(rule: SettingRule, tmp_path: Path) -> None:
    value = NODE_KEYS[rule.name]
    (tmp_path / "seeds.txt").write_text("10.0.0.9:9747\n")
    table, name = ("", rule.key[0]) if len(rule.key) == 1 else rule.key
    where = ConfigFile() if not table else getattr(ConfigFile(), table)
    kind = {field.name: str(field.type) for field in msgspec.structs.fields(type(where))}[name]
    shown = f'"{value}"'
    if "tuple" in kind:
        shown = f'["{value}"]'
    elif value in ("true", "false") or value.isdecimal():
        shown = value
    file = tmp_path / "node.toml"
    file.write_text((f"[{table}]\n" if table else "") + f"{name} = {shown}\n")
    usual = resolve({}, {})
    assert resolve({"config": str(file)}, {}) != usual
    given = str(tmp_path / value) if rule.name == "seed_files" else value
    assert resolve({}, {rule.environment: given}) != usual


def config_fields(value: Any) -> Iterator[str]:
    for name in value.__dataclass_fields__:
        inner = getattr(value, name)
        if hasattr(inner, "__dataclass_fields__") and type(inner).__module__ == Config.__module__:
            yield from config_fields(inner)
        else:
            yield name


def test_each_setting_of_a_node_is_read() -> None:
    assert unread(set(config_fields(resolve({}, {})))) == set()


# Flags

COMMANDS_WITHOUT_BODY = {"debug"}
"""Parameters that are read elsewhere: `node.cli.errors` looks for --debug before anything is parsed."""
EITHER = (
    ["dht", "get", "abc", "--immutable", "--publisher", "x"],
    ["dht", "get", "abc", "--raw", "--json"],
    ["dht", "put", "key", "value", "--immutable"],
    ["runs", "metrics", "abc", "--csv", "--json"],
    ["top", "--once", "--every", "3s"],
    ["top", "--json", "--every", "3s"],
    ["model", "capture", "simple-cnn", "--explain", "--out", "x.peerloom"],
    ["model", "capture", "simple-cnn", "--explain", "--split", "x"],
    ["model", "capture", "simple-cnn", "--explain", "--no-proof"],
    ["plan", "gpt2", "--objective", "latency", "--pipeline", "gpipe"],
    ["plan", "gpt2", "--objective", "latency", "--optimizer", "sgd"],
    ["plan", "gpt2", "--replicas", "2", "--replicas-min", "2"],
    ["train", "RUN.toml", "--out", "x", "--detach"],
    ["predict", "RUN.toml", "--run", "a", "--weights", "b"],
    ["--listen", "127.0.0.1:0", "status"],
    ["--listen", "127.0.0.1:0", "--port", "9747"],
    ["train", "RUN.toml", "--devices", "common,cpu"],
    ["--record", "x", "status"],
)
"""Pairs of flags of which one would have no effect with the other."""


def callbacks(command: Any, name: str = "peerloom") -> Iterator[tuple[str, Callable[..., Any], list[str]]]:
    """Yield each command: its name, the function that it calls, and its parameters."""
    if command.callback is not None:
        yield name, inspect.unwrap(command.callback), [each.name for each in command.params]
    for word, each in getattr(command, "commands", {}).items():
        yield from callbacks(each, f"{name} {word}")


def test_each_flag_of_each_command_is_read() -> None:
    unread = []
    for tree in (app, simulator):
        for name, function, parameters in callbacks(typer.main.get_command(tree)):
            body = ast.parse(inspect.getsource(function).lstrip())
            read = {each.id for each in ast.walk(body) if isinstance(each, ast.Name)}
            unread += [f"{name}: {each}" for each in parameters if each not in read | COMMANDS_WITHOUT_BODY]
    assert unread == []


@pytest.mark.parametrize("words", EITHER, ids=" ".join)
def test_a_flag_without_effect_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PEERLOOM_DATA_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert run(words) == UsageError.exit_code
    assert "no node runs" not in capsys.readouterr().err
