"""`predict` applies a run's weights to samples, compares with the truth, and writes a file, metrics and a
picture."""

import csv
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import safetensors.numpy
import torch

from node.cli.predict_svg import SAMPLES_SHOWN_MAX, picture
from node.content.datasets import load_digits
from node.content.metrics import judge
from node.main import run
from partition.capture.models import BUILTIN
from tests.node.test_sources import gray, png

OWN = """
import torch
from torch import nn
from partition.capture.task import Task

def build():
    torch.manual_seed(0)
    return Task(nn.Linear(2, 3), (torch.zeros(4, 2),), (torch.zeros(4, dtype=torch.long),),
                loss=nn.functional.cross_entropy)
"""


def digits_run(folder: Path) -> tuple[Path, Path, Any]:
    """Write a RUN.toml and untrained weights; return their model."""
    torch.manual_seed(1)
    model = BUILTIN["simple-cnn"]((1, 8, 8), 10).model
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    safetensors.numpy.save_file(weights, folder / "w.safetensors")
    (folder / "run.toml").write_text('model = "simple-cnn"\ndata = "digits"\n')
    return folder / "run.toml", folder / "w.safetensors", model


def test_outputs_are_those_of_the_model_and_are_compared_with_the_truth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file, weights, model = digits_run(tmp_path)
    out, drawn = tmp_path / "p.npz", tmp_path / "p.svg"
    flags = ["--weights", str(weights), "--out", str(out), "--picture", str(drawn), "--json"]
    assert run(["predict", str(run_file), *flags]) == 0
    document = json.loads(capsys.readouterr().out)
    test = load_digits().test
    with torch.no_grad():
        expected = model.eval()(torch.tensor(test["x"]).float()).numpy()
    found = np.load(out)
    np.testing.assert_allclose(found["outputs"], expected, rtol=1e-5, atol=1e-6)
    assert np.array_equal(found["predicted"], expected.argmax(1))
    assert np.array_equal(found["truth"], test["y"])
    assert document["metrics"]["accuracy"] == pytest.approx((expected.argmax(1) == test["y"]).mean())
    assert np.sum(document["confusion"]) == len(test["y"])
    text = drawn.read_text()
    ElementTree.fromstring(text)
    assert "confusion matrix" in text
    assert "data:image/png" in text


def predicted_rows(folder: Path, table: str) -> list[dict[str, str]]:
    """Return the rows that `predict` writes for a table, with a user's own model that was trained on another
    table."""
    (folder / "own.py").write_text(OWN)
    (folder / "train.csv").write_text("a,b,kind\n1,2,cat\n2,1,dog\n3,3,ant\n")
    (folder / "new.csv").write_text(table)
    (folder / "run.toml").write_text(f'model = "own.py:build"\ndata = "{folder}/train.csv"\n')
    weights = {"weight": np.array([[0, 1], [0, 0], [1, 0]], np.float32), "bias": np.zeros(3, np.float32)}
    safetensors.numpy.save_file(weights, folder / "w.safetensors")
    flags = ["--weights", str(folder / "w.safetensors"), "--data", str(folder / "new.csv")]
    assert run(["predict", str(folder / "run.toml"), *flags, "--out", str(folder / "p.csv")]) == 0
    return list(csv.DictReader((folder / "p.csv").read_text().splitlines()))


def test_a_users_model_predicts_the_classes_of_a_table_in_words(tmp_path: Path) -> None:
    rows = predicted_rows(tmp_path, "a,b,kind\n5,1,dog\n1,5,cat\n")
    assert [(row["predicted"], row["truth"]) for row in rows] == [("dog", "dog"), ("ant", "cat")]
    assert [float(rows[0][f"output_{n}"]) for n in range(3)] == [1, 0, 5]


def test_class_names_that_look_like_equal_numbers_stay_distinct(tmp_path: Path) -> None:
    words = ["1_1", "11", "1_11", "11_1"]
    (tmp_path / "own.py").write_text(OWN.replace("nn.Linear(2, 3)", "nn.Linear(2, 4)"))
    lines = "".join(f"{n % 4},{n},{words[n % 4]}\n" for n in range(16))
    (tmp_path / "d.csv").write_text(f"a,b,kind\n{lines}")
    data = f'[data]\nsource = "{tmp_path}/d.csv"\nlabel = "kind"\n'
    (tmp_path / "run.toml").write_text(f'model = "own.py:build"\n{data}')
    # Four linear functions that are highest for a = 0, 1, 2 and 3, in the order of the words' class numbers.
    order = [sorted(words).index(word) for word in words]
    weight, bias = np.zeros((4, 2), np.float32), np.zeros(4, np.float32)
    for value, number in enumerate(order):
        weight[number, 0], bias[number] = 2 * value, -value * value
    safetensors.numpy.save_file({"weight": weight, "bias": bias}, tmp_path / "w.safetensors")
    flags = ["--weights", str(tmp_path / "w.safetensors"), "--data", str(tmp_path / "d.csv")]
    assert run(["predict", str(tmp_path / "run.toml"), *flags, "--out", str(tmp_path / "p.csv")]) == 0
    rows = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    assert [row["truth"] for row in rows] == words * 4
    assert [row["predicted"] for row in rows] == words * 4


def test_a_table_without_labels_is_predicted_by_its_column_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = predicted_rows(tmp_path, "b,a\n1,5\n5,1\n")
    assert "2 samples; no labels" in capsys.readouterr().out
    assert [row["predicted"] for row in rows] == ["dog", "ant"]
    assert "truth" not in rows[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--run RUN or --weights"),
        (["--weights", "none"], "no weights that can be read"),
        (["--weights", "other.safetensors"], "the weights have no"),
        (["--weights", "w.safetensors", "--out", "p.txt"], "want FILE.npz or FILE.csv"),
        (["--weights", "w.safetensors", "--picture", "p.png"], "want FILE.svg"),
        (["--weights", "w.safetensors", "--data", "none.csv"], "no such file"),
        (["--weights", "w.safetensors", "--data", "wide.npz"], "the model fails on these samples"),
    ],
    ids=["neither", "no file", "another model", "suffix", "no svg", "no data", "shape"],
)
def test_impossible_predictions_are_refused_with_a_reason(
    flags: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    digits_run(tmp_path)
    safetensors.numpy.save_file({"a": np.zeros(1)}, tmp_path / "other.safetensors")
    np.savez(tmp_path / "wide.npz", x=np.zeros((3, 2, 9, 9), np.float32), y=np.zeros(3, np.int64))
    monkeypatch.chdir(tmp_path)
    assert run(["predict", "run.toml", *flags]) == 2
    assert words in capsys.readouterr().err


def test_a_sample_covers_all_classes_of_data_sorted_by_class() -> None:
    truth = np.repeat(np.arange(10), 40)
    x = np.zeros((len(truth), 1, 8, 8), np.float32)
    text = picture(confusion=None, inputs=[x], predicted=truth, truth=None, words=list("abcdefghij"))
    assert text.count("<image") == SAMPLES_SHOWN_MAX
    assert all(f">{word}<" in text for word in "abcdefghij")


def test_metrics_are_those_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(1)
    outputs, truth = rng.normal(size=(500, 7)), rng.integers(0, 7, 500)
    outputs[np.arange(500), truth] += 1.5
    found = judge(outputs, truth)
    best = outputs.argmax(1)
    assert found.confusion is not None
    assert np.array_equal(found.confusion, metrics.confusion_matrix(truth, best))
    for name, function in (("precision", "precision"), ("recall", "recall"), ("f1", "f1")):
        expected = getattr(metrics, f"{function}_score")(truth, best, average="macro")
        assert found.metrics[name] == pytest.approx(expected)
    assert found.metrics["top_5"] == pytest.approx(metrics.top_k_accuracy_score(truth, outputs, k=5))
    shares = np.exp(outputs) / np.exp(outputs).sum(1, keepdims=True)
    assert found.metrics["cross_entropy"] == pytest.approx(metrics.log_loss(truth, shares))


def test_predictions_of_tokens_and_numbers_are_evaluated_too() -> None:
    rng = np.random.default_rng(2)
    logits, tokens = rng.normal(size=(3, 5, 11)), rng.integers(0, 11, (3, 5))
    tokens[0, 0] = -100
    found = judge(logits, tokens)
    assert found.metrics["samples"] == 14
    assert found.metrics["perplexity"] == pytest.approx(np.exp(found.metrics["cross_entropy"]))
    assert judge(np.moveaxis(logits, -1, 1), tokens).metrics == found.metrics
    numbers = judge(np.array([[1.0], [2.0], [4.0]]), np.array([1.0, 2.0, 3.0]))
    assert numbers.metrics["mean_squared_error"] == pytest.approx(1 / 3)
    assert numbers.metrics["r2"] == pytest.approx(0.5)


def test_images_are_predicted_from_a_folder(tmp_path: Path) -> None:
    torch.manual_seed(1)
    for number, name in enumerate(("ants", "bees")):
        for copy in range(3):
            png(tmp_path / "pictures" / name / f"{copy}.png", gray(40 * number + copy, 8, 8))
    model = BUILTIN["simple-cnn"]((3, 8, 8), 2).model
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    safetensors.numpy.save_file(weights, tmp_path / "w.safetensors")
    pytest.importorskip("PIL")
    (tmp_path / "run.toml").write_text(f'model = "simple-cnn"\ndata = "{tmp_path}/pictures"\n')
    flags = ["--weights", str(tmp_path / "w.safetensors"), "--data", str(tmp_path / "pictures")]
    assert run(["predict", str(tmp_path / "run.toml"), *flags, "--out", str(tmp_path / "p.csv")]) == 0
    rows = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    assert [row["truth"] for row in rows] == ["ants"] * 3 + ["bees"] * 3
    flags[3] = str(tmp_path / "pictures" / "bees")
    assert run(["predict", str(tmp_path / "run.toml"), *flags, "--out", str(tmp_path / "q.csv")]) == 0
    unlabelled = list(csv.DictReader((tmp_path / "q.csv").read_text().splitlines()))
    assert [row["predicted"] for row in unlabelled] == [row["predicted"] for row in rows[3:]]
    assert "truth" not in unlabelled[0]
