"""Texts become tokens with the model's tokenizer, or are refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from node.content.sources import SampleParts, SourceWish, read
from node.content.tokens import Language
from node.errors import UsageError
from node.main import run
from node.protocols.data_table import DataTable
from tests.data.model_folders import write_folder, write_tokenizer

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")


def windows(text: str, *, window: int = 8, **tokenizer: Any) -> SampleParts:
    Path("t.txt").write_text(text)
    write_tokenizer(Path("t.json"), **tokenizer)
    language = Language("t.json", "", window)
    return read(SourceWish("t.txt", Path(), DataTable("t.txt"), language=language))


def test_token_ids_larger_than_the_number_of_tokens_are_kept() -> None:
    found = windows("a b " * 40, ids={"a": 70_000})
    assert 70_000 in set(np.unique(found.parts["train"]["x"]).tolist())
    assert found.reading.vocabulary == 70_001


def test_a_truncating_tokenizer_does_not_truncate_texts() -> None:
    assert "100 tokens of t.json" in windows("a" * 100, max_length=5).reading.form


def test_a_text_that_is_not_utf_8_is_refused() -> None:
    write_tokenizer(Path("t.json"))
    Path("t.txt").write_bytes("café ".encode("cp1252") * 40)
    with pytest.raises(UsageError, match=r"t\.txt: not UTF-8"):
        read(SourceWish("t.txt", Path(), DataTable("t.txt"), language=Language("t.json", "", 8)))


def test_the_folders_own_tokenizer_makes_the_tokens(capsys: Capture) -> None:
    write_folder(Path("m"))
    Path("t.txt").write_text("abc " * 100)
    Path("RUN.toml").write_text('model = "m"\ndata = "t.txt"\n[train]\nwindow = 16\n')
    assert run(["data", "show", "RUN.toml"]) == 0
    shown = capsys.readouterr().out
    assert "400 tokens of m/tokenizer.json, in windows of 16" in shown
    assert "sample    'abc abc abc abc'" in shown


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(capsys: Capture) -> None:
    write_folder(Path("m"), vocab_size=60)
    Path("t.txt").write_text("abc " * 100)
    assert run(["data", "show", "t.txt", "--model", "m"]) == 2
    error = capsys.readouterr().err
    assert "m/tokenizer.json: gives the id" in error
    assert "the model in m has 60 tokens" in error
    assert "resize_token_embeddings" in error


def test_without_a_tokenizer_a_text_model_reads_bytes_only_on_request(capsys: Capture) -> None:
    write_folder(Path("m"), vocab_size=5_000)
    Path("m/tokenizer.json").unlink()
    Path("t.txt").write_text("abc " * 100)
    assert run(["data", "show", "t.txt", "--model", "m"]) == 2
    error = capsys.readouterr().err
    assert "knows 5,000 tokens, and there is no tokenizer.json" in error
    assert 'form = "bytes"' in error
    assert run(["data", "show", "t.txt", "--model", "m", "--form", "bytes"]) == 0


@pytest.mark.parametrize(
    ("lines", "said", "do"),
    [
        ("[train]\nwindow = 65", "train.window 65: the model takes 64 tokens at most", "train.window = 64"),
        (
            "[train]\nwindow = 8\n[options]\nlength = 16",
            "train.window is 8, and options.length is 16",
            "leave",
        ),
    ],
)
def test_the_error_for_an_impossible_window_names_the_setting(
    lines: str, said: str, do: str, capsys: Capture
) -> None:
    write_folder(Path("m"))
    Path("t.txt").write_text("abc " * 100)
    Path("RUN.toml").write_text(f'model = "m"\ndata = "t.txt"\n{lines}\n')
    assert run(["data", "show", "RUN.toml"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert f"do: {do}" in error
