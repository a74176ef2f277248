"""RUN.toml without a model: which defaults are chosen, and which files are refused."""

import tomllib
from pathlib import Path

import pytest

from node import toml
from node.api.task_defaults import TASKS, read_run
from node.errors import UsageError
from node.protocols.run_file import RunFile
from partition.capture.models import BUILTIN


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ('data = "digits"', "simple-cnn"),
        ('model = "vision"', "simple-cnn"),
        ('data = "images"', "simple-cnn"),
        ('data = "rows.npz"', "simple-cnn"),
        ('data = "words.txt"', "gpt"),
        ('model = "language"\ndata = "words.txt"', "gpt"),
        ('data = "words.txt"\ntokenizer = "tokenizer.json"', "gpt"),
    ],
)
def test_a_run_without_a_model_gets_the_default_for_its_data(tmp_path: Path, text: str, model: str) -> None:
    (tmp_path / "images").mkdir()
    run, said = read_run(text, tmp_path, "RUN.toml")
    assert run.model == model
    kind = "language" if model == "gpt" else "vision"
    assert said.startswith(f"model: {kind}{'' if 'model' in text else ' (none is given)'}: {model}, ")
    assert run.train.batch == TASKS[kind].train["batch"]


def test_given_keys_are_kept_and_a_named_model_gets_no_defaults(tmp_path: Path) -> None:
    text = 'data = "w.txt"\noptions = {layers = 1}\n[train]\nlearning_rate = 0.5\n'
    run, _ = read_run(text, tmp_path, "RUN.toml")
    assert (run.options["layers"], run.options["heads"]) == (1, 4)
    assert (run.train.learning_rate, run.train.clip_norm) == (0.5, 1.0)
    text = 'model = "simple-cnn"'
    assert read_run(text, tmp_path, "RUN.toml") == (RunFile("simple-cnn"), "")


@pytest.mark.parametrize("data", ["table.csv", "my.py:build"])
def test_data_without_a_clear_task_has_no_default_model(tmp_path: Path, data: str) -> None:
    with pytest.raises(UsageError, match="the key 'model' is missing, and there is no default for"):
        read_run(f'data = "{data}"', tmp_path, "RUN.toml")


def test_the_defaults_name_existing_models_and_keys() -> None:
    for task in TASKS.values():
        assert task.model in BUILTIN
        document = "\n".join(f"{key} = {value}" for key, value in task.train.items())
        assert tomllib.loads(document) == dict(task.train)
        toml.parse(f"[train]\n{document}", RunFile, name="RUN.toml")
