"""`model capture`, `model show` and `model verify`: files, output, pictures and errors."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from node.cli.model_summary import count_text, portrait, portrait_lines, read_graph, short_name
from node.cli.model_svg import ARCS_MAX, picture
from node.main import run
from partition.model.graph import decode_graph, encode_graph, graph_hash
from partition.model.layers import with_layers
from tests.partition.test_layers import transformer

ROOT = str(Path(__file__).parents[2])
OWN = """
import dataclasses

import torch
from torch import nn
from torch.nn import functional
from partition.capture import Task


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.down = nn.Linear(16, width)
        self.middle = nn.Linear(width, width)
        self.up = nn.Linear(width, 16)

    def forward(self, x):
        h = self.down(x).relu()
        return self.up(self.middle(h).tanh()) + x


def net(width=8):
    torch.manual_seed(5)
    return Task(Net(int(width)), (torch.zeros(2, 16),), labels=(torch.zeros(2, 16),),
                loss=lambda output, y: functional.mse_loss(output, y, reduction="sum"), name="own-net")


def other():
    task = net()
    with torch.no_grad():
        task.model.up.bias += 1
    return task


class Changed(Net):
    def forward(self, x):
        h = self.down(x).relu()
        return self.up(self.middle(h).sigmoid()) + x


def changed():
    return dataclasses.replace(net(), model=Changed(8))


def sneaky():
    return dataclasses.replace(net(), loss=lambda output, y: ((output - y) ** 2).mean().item())
"""


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the real environment variables and colours away from the tests."""
    for name in [name for name in os.environ if name.startswith("PEERLOOM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a user's own model and its captured files."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "own.py").write_text(OWN, encoding="utf-8")
    assert (
        run(["model", "capture", f"{folder}/own.py:net", "-o", f"{folder}/own.peerloom", "--no-proof"]) == 0
    )
    return folder


def told(capsys: pytest.CaptureFixture[str], arguments: Sequence[str], code: int = 0) -> tuple[str, str]:
    """Run one command, and return its stdout and stderr."""
    capsys.readouterr()
    assert run(list(arguments)) == code
    captured = capsys.readouterr()
    return captured.out, captured.err


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(told(capsys, ["model", "show", *arguments, "--json"])[0])
    return document


def test_a_model_of_torch_layers_is_named_after_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sheep_counter.py").write_text(
        "import torch\n"
        "from partition.capture import Task\n"
        "def net():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))\n"
        "    return Task(model, (torch.zeros(2, 4),), labels=(torch.zeros(2, 2),),\n"
        "                loss=lambda output, y: torch.nn.functional.mse_loss(output, y, reduction='sum'))\n"
    )
    out = str(tmp_path / "net.peerloom")
    told(capsys, ["model", "capture", f"{tmp_path}/sheep_counter.py:net", "-o", out])
    assert shown(capsys, out)["name"] == "sheep_counter"


def test_capture_writes_the_graph_and_the_values_to_two_files(folder: Path) -> None:
    data = (folder / "own.peerloom").read_bytes()
    graph = decode_graph(data)
    assert encode_graph(graph) == data
    assert graph.name == "own-net"
    assert graph.layers == ("down", "middle", "up")
    assert (folder / "own.safetensors").stat().st_size > (16 * 8 + 8 * 8 + 8 * 16 + 8 + 8 + 16) * 4


def test_capture_overwrites_no_unrelated_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file at the path of the initial values may be the result of a long run."""
    result = folder / "run.safetensors"
    result.write_bytes(b"weeks of training")
    drawn = ["model", "capture", "simple-cnn", "--sample", "1,8,8", "--classes", "10", "--no-proof"]
    told(capsys, [*drawn, "-o", f"{folder}/run.peerloom"])
    assert result.read_bytes() == b"weeks of training"
    _, err = told(
        capsys, ["model", "capture", f"{folder}/own.py:net", "--no-proof", "-o", f"{folder}/run.peerloom"], 2
    )
    assert "run.safetensors already exists" in err
    assert result.read_bytes() == b"weeks of training"
    for _ in range(2):
        told(
            capsys, ["model", "capture", f"{folder}/own.py:net", "--no-proof", "-o", f"{folder}/new.peerloom"]
        )


def test_capture_prints_the_largest_error_and_json_lists_all_errors(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = told(
        capsys,
        [
            "model", "capture", f"{folder}/own.py:net", "-o", f"{folder}/wide.peerloom", "--json",
            "--set", "width=12", "--split", "up", "--dtype", "float64",
        ],
    )  # fmt: skip
    document = json.loads(out)
    assert document["schema"] == "peerloom/model-capture/1"
    assert [layer["name"] for layer in document["layers"]] == ["down", "up"]
    assert document["parameters"]["bytes"] == 8 * (16 * 12 + 12 * 12 + 12 * 16 + 12 + 12 + 16)
    assert document["proof"]["gradients"] == 6
    assert document["proof"]["error"] <= document["proof"]["tolerance"] <= 1e-9
    assert document["hash"] == graph_hash((folder / "wide.peerloom").read_bytes()).hex()
    assert err.startswith("capturing ")


def test_show_prints_a_table_of_layers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = told(capsys, ["model", "show", f"{folder}/own.peerloom", "--batch", "4"])
    lines = out.splitlines()
    assert err == ""
    assert lines[0].startswith("own-net  ")
    assert lines[1] == "  parameters  352 in 6 tensors, 1.4 kB"
    assert lines[2] == "  sizes       batch 4 (1 to 4096)"
    train = "  train       x float32 (batch, 16), label float32 (batch, 16) -> loss; "
    assert lines[3].startswith(train)
    assert lines[5].split() == ["LAYER", "NAME", "PARAMETERS", "FORWARD", "KEPT", "SENDS"]
    # The last layer uses x. So x crosses both boundaries in addition to the layer's own result.
    assert lines[6].split()[:5] == ["0", "down", "544", "bytes", "1.1"]
    assert lines[6].endswith("384 bytes in 2 tensors")
    assert lines[8].endswith(" -")
    assert lines[9].split()[0] == "all"


def test_show_as_json_has_everything_that_the_screen_has(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = shown(capsys, f"{folder}/own.peerloom", "--batch", "4", "--stages", "3")
    assert document["schema"] == "peerloom/model/1"
    assert [layer["output_bytes"] for layer in document["layers"]] == [384, 384, 0]
    assert document["skips"] == [{"first": 0, "last": 2, "bytes": 4 * 16 * 4}]
    assert [(stage["first"], stage["last"]) for stage in document["stages"]] == [(0, 0), (1, 1), (2, 2)]
    # The input has no gradient. So only one of the two tensors that cross comes back.
    assert [stage["gradient_tensors"] for stage in document["stages"]] == [1, 1, 0]
    graph, name = read_graph(folder / "own.peerloom")
    again = portrait(folder / "own.peerloom", graph, name, batch=4, stages=3)
    assert again == document
    assert "3 stages, each a machine of 50.0 GFLOP/s" in "\n".join(portrait_lines(again))


def test_verify_runs_every_check(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = told(capsys, ["model", "verify", f"{folder}/own.peerloom", f"{folder}/own.py:net"])
    labels = [line.split()[:2] for line in out.splitlines()[1:]]
    assert labels == [["form", "ok"], ["values", "ok"], ["admission", "ok"], ["proof", "ok"]]
    document = json.loads(told(capsys, ["model", "verify", f"{folder}/own.peerloom", "--json"])[0])
    assert document["schema"] == "peerloom/model-verify/1"
    assert (document["values_bytes"], document["proof"]) == (352 * 4, None)
    # Forward and backward passes of each of the three layers for eight samples. The first layer computes no
    # gradient of x.
    assert document["admission"]["flops"] == 8 * 2 * (16 * 8 * 2 + 8 * 8 * 3 + 8 * 16 * 3)


REFUSED = [
    ("show {}/none.peerloom", 2, "No such file or directory"),
    ("show {}/own.py", 2, "own.py: not a captured model"),
    ("show {}/cut.peerloom", 2, "cut.peerloom: not a captured model"),
    ("show {}/own.peerloom --batch 5000", 2, "--batch: batch is 5000, but must be from 1 to 4096"),
    ("show {}/own.peerloom --batch -1", 2, "--batch: want a number from 1"),
    (
        "show {}/own.peerloom --stages 4",
        5,
        "--stages 4: 4 stages are requested, but the model has only 3 layers",
    ),
    ("show {}/own.peerloom --svg {}/no/such.svg", 2, "such.svg: no folder"),
    ("show", 2, "missing argument 'FILE'"),
    ("verify {}/lone.peerloom", 2, "lone.safetensors: No such file or directory"),
    ("verify {}/spoilt.peerloom", 2, "spoilt.peerloom: "),
    (
        "verify {}/own.peerloom {}/own.py:nothing",
        2,
        "has no function 'nothing'; it has changed, net, other, sneaky",
    ),
    ("capture gtp", 2, "no model is called 'gtp'; did you mean 'gpt'?"),
    ("capture gpt", 2, "gpt needs --sample and --classes"),
    ("capture gpt --sample 8x8 --classes 3", 2, "--sample 8x8: want whole numbers with commas"),
    ("capture {}/own.py:net --set width", 2, "--set width: want KEY=NUMBER"),
    ("capture {}/own.py:net --set depth=2", 2, "depth"),
    ("capture {}/own.py:net --dtype float16", 2, "--dtype float16: want float32 or float64"),
    ("capture {}/own.py:net -o model.bin", 2, "--out model.bin: want a name that ends in .peerloom"),
    ("capture {}/own.py:net -o {}/x.peerloom --split fc", 2, "no module 'fc' in the model"),
    (
        "capture {}/own.py:sneaky -o {}/x.peerloom",
        2,
        "it must be a tensor with a single number, summed over samples",
    ),
    ("capture {}/none.py:net -o {}/x.peerloom", 2, "there is no file"),
]


@pytest.mark.parametrize(("command", "code", "complaint"), REFUSED)
def test_bad_input_is_reported_in_three_lines_and_a_code(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str, code: int, complaint: str
) -> None:
    data = (folder / "own.peerloom").read_bytes()
    values = (folder / "own.safetensors").read_bytes()
    (folder / "cut.peerloom").write_bytes(data[:-1])
    (folder / "lone.peerloom").write_bytes(data)
    (folder / "spoilt.peerloom").write_bytes(data)
    (folder / "spoilt.safetensors").write_bytes(values[:-1] + bytes([values[-1] ^ 1]))
    _, err = told(capsys, ["model", *command.replace("{}", str(folder)).split()], code)
    error = err[err.index("error: ") :]
    assert complaint in error
    assert len(error.splitlines()) <= 3
    assert not (folder / "x.peerloom").exists()


def test_another_model_is_detected_by_its_proof(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The parameters are the same but the activation differs, so only a comparison of values can detect
    it."""
    _, err = told(capsys, ["model", "verify", f"{folder}/own.peerloom", f"{folder}/own.py:changed"], 2)
    assert "own.peerloom: " in err[err.index("error: ") :]


def test_different_values_of_the_same_model_are_reported(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = told(capsys, ["model", "verify", f"{folder}/own.peerloom", f"{folder}/own.py:other"])
    assert out.endswith("the file's initial values differ from this code's in 1 tensor\n")


def test_show_loads_neither_trio_nor_torch_nor_numpy(folder: Path) -> None:
    program = (
        "import sys; from node.main import run; code = run(sys.argv[1:]);"
        "heavy = {'trio', 'torch', 'numpy', 'rich'} & set(sys.modules);"
        "sys.exit(f'code {code}, loaded {heavy}' if code or heavy else 0)"
    )
    arguments = [
        "model",
        "show",
        str(folder / "own.peerloom"),
        "--svg",
        str(folder / "o.svg"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, f"drawn into {folder / 'o.svg'}\n")


# The picture


def drawn(document: dict[str, Any]) -> ElementTree.Element:
    return ElementTree.fromstring(picture(document))


def kinds(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [element for element in root if element.get("class") == name]


@pytest.fixture
def tied(tmp_path: Path) -> dict[str, Any]:
    graph = with_layers(transformer(2))
    path = tmp_path / "tied.peerloom"
    path.write_bytes(encode_graph(graph))
    return portrait(path, graph, graph_hash(encode_graph(graph)), stages=2)


def test_a_picture_has_bars_for_layers_and_arcs_for_shared_weights(tied: dict[str, Any]) -> None:
    root = drawn(tied)
    # the first one belongs to the legend
    bars = [float(bar.get("width", 0)) for bar in kinds(root, "time")][1:]
    flops = [layer["forward_flops"] for layer in tied["layers"]]
    assert len(bars) == len(flops) == 6
    assert bars == pytest.approx([max(1, 360 * count / max(flops)) for count in flops], abs=0.1)
    assert len(kinds(root, "edge")) == 5
    assert [arc[0].text for arc in kinds(root, "tied") if len(arc)] == ["wte.weight = lm_head.weight"]
    assert [band.get("class") for band in root if band.get("class") in ("band", "other")] == ["band", "other"]
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"h.1.mlp", "stage 2", "shared weights"} <= set(texts)


def test_everything_in_a_picture_lies_inside_its_frame(tied: dict[str, Any]) -> None:
    tied["skips"] = [
        {"first": first, "last": last, "bytes": 10} for first in range(5) for last in range(first, 6)
    ]
    root = drawn(tied)
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for element in root:
        if element.tag.endswith("text"):
            size = (9.7 if element.get("class") == "title" else 6.7) * len(element.text or "")
            left = float(element.get("x", 0)) - (size if element.get("text-anchor") == "end" else 0)
            assert left >= 0
            assert left + size <= width
            assert 0 < float(element.get("y", 0)) <= height
        elif element.tag.endswith("rect"):
            assert 0 <= float(element.get("x", 0)) <= width - float(element.get("width", 0))
            assert 0 <= float(element.get("y", 0)) <= height - float(element.get("height", 0))
    # If there is too little room, arcs overlap.
    ends = {arc.get("d", "").split("h")[1].split("q")[0] for arc in kinds(root, "skip") if len(arc)}
    assert 1 < len(ends) <= ARCS_MAX


def test_names_cannot_inject_markup_into_a_picture(tied: dict[str, Any]) -> None:
    tied["name"] = "</title><script>alert(1)</script>"
    tied["layers"][0]["name"] = "a<b & c>"
    tied["tied"][0]["names"] = ["<x>"]
    root = drawn(tied)
    assert not [element for element in root.iter() if "script" in element.tag]
    assert "a<b & c>" in [element.text for element in root.iter()]


def test_long_numbers_and_names_are_abbreviated() -> None:
    assert [count_text(number, "FLOP") for number in (0, 999, 1_000, 1_234_567, 3e15)] == [
        "0 FLOP",
        "999 FLOP",
        "1.0 kFLOP",
        "1.2 MFLOP",
        "3.0 PFLOP",
    ]
    assert count_text(124_439_808) == "124.4 M"
    assert short_name("a." * 40 + "weight").startswith("...")
    assert len(short_name("a." * 40 + "weight")) == 44


EXPLAINED = """
import torch
from torch import nn
from partition.capture import Task

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.head = nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 3)
        self.spare = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.drop(self.first(x)))

class Bad(Net):
    def forward(self, x):
        return self.head(self.first(x)) + torch.unique(x).sum() + torch.histc(x, 4).sum()

def loss(output, labels):
    return nn.functional.cross_entropy(output, labels)

def task(model):
    return Task(model, (torch.randn(4, 4),), (torch.zeros(4).long(),), loss=loss)

def good():
    return task(Net())

def bad():
    return task(Bad())
"""


def test_explain_describes_a_model_and_writes_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(EXPLAINED)
    assert run(["model", "capture", f"{tmp_path}/mine.py:good", "--explain"]) == 0
    out = capsys.readouterr().out
    for words in (
        "can be captured",
        "a sum, and the number by which it is divided",
        "drawn in module 'drop'",
        "spare.weight",
    ):
        assert words in out
    assert run(["model", "capture", f"{tmp_path}/mine.py:good", "--explain", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["refusals"], document["facts"]["batch"]) == ([], "1 to 4096 samples in a micro-batch")
    assert [path.name for path in tmp_path.glob("*.peerloom")] == []


def test_explain_lists_every_reason_with_line_and_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(EXPLAINED)
    assert run(["model", "capture", f"{tmp_path}/mine.py:bad", "--explain"]) == 2
    error = capsys.readouterr().err
    assert "1. the model itself" in error
    assert "2. the model itself" in error
    assert f"mine.py:{EXPLAINED.splitlines().index('class Bad(Net):') + 3}" in error
    assert "use a mask" in error
    assert "for 2 reasons" in error
