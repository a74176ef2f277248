"""How data was read is shown before training, and stored with the run. Ambiguous data is refused until a key
decides."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from node.content.fenced_reading import read_fenced
from node.content.sources import SourceWish
from node.errors import UsageError
from node.main import run
from node.protocols.data_table import DataTable

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")


def fenced(name: str, folder: Path) -> Any:
    return read_fenced(SourceWish(name, folder, DataTable(name)), folder)


def test_a_byte_order_mark_is_not_part_of_the_first_name(capsys: Capture) -> None:
    rows = "".join(f"{n % 3},{n},{n * 2}\r\n" for n in range(9))
    Path("digits.csv").write_text(f"\ufefflabel,p0,p1\r\n{rows}", encoding="utf-8", newline="")
    assert run(["data", "show", "digits.csv", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["column"], shown["features"]) == ("label", ["p0", "p1"])
    assert "byte-order mark" in shown["form"]
    assert [each["samples"] for each in shown["classes"]] == [3, 3, 3]


def test_a_line_copied_from_the_error_resolves_an_ambiguity(capsys: Capture) -> None:
    Path("d.csv").write_text("cut,x,y,z\n" + "".join(f"{n % 2},{n}.5,{n},{n}\n" for n in range(20)))
    Path("RUN.toml").write_text('model = "mlp"\ndata = "d.csv"\n')
    assert run(["data", "show", "RUN.toml"]) == 2
    error = capsys.readouterr().err
    assert "'y' (whole numbers, each once), 'z'" in error
    assert len(error.splitlines()) <= 3
    lines = re.findall(r"data = \{.*?\}", error)
    assert len(lines) == 2
    assert 'label = "y"' in lines[0]
    Path("RUN.toml").write_text(f'model = "mlp"\n{lines[1]}\n')
    assert run(["data", "show", "RUN.toml"]) == 0
    assert "label     'z', by the key" in capsys.readouterr().out


def test_a_key_that_does_not_apply_to_a_source_is_refused(capsys: Capture) -> None:
    np.savez("d.npz", x=np.zeros((4, 2)), y=np.arange(4))
    for source, flags in (("d.npz", ["--separator", ";"]), ("digits", ["--label", "y"])):
        assert run(["data", "show", source, *flags]) == 2
        assert "[data]" in capsys.readouterr().err


def test_errors_name_a_part_as_the_user_does(tmp_path: Path, capsys: Capture) -> None:
    np.savez(
        "d.npz",
        train_x=np.zeros((4, 2), np.int8),
        train_y=np.arange(4),
        test_x=np.zeros((2, 2)),
        test_y=np.arange(2),
    )
    assert run(["data", "show", "d.npz"]) == 2
    error = capsys.readouterr().err
    assert "d.npz: x of train is int8, but of test float64" in error
    assert "train.npz" not in error
    assert "/tmp" not in error.replace(str(tmp_path), "")


# The sandboxed process


def test_a_parquet_file_that_expands_enormously_is_refused_within_bounds(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    words = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 200), ["a" * 20_000_000])
    parquet.write_table(
        pyarrow.table({"a": range(200), "label": words}), "swells.parquet", compression="zstd"
    )
    assert (tmp_path / "swells.parquet").stat().st_size < 100_000
    with pytest.raises(UsageError, match=r"swells\.parquet: takes more memory"):
        fenced("swells.parquet", tmp_path)


def test_a_table_of_very_many_columns_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "wide.csv").write_text("a," * 199_999 + "label\n" + "1," * 199_999 + "0\n")
    with pytest.raises(UsageError, match=r"200,000 columns; at most 65,536"):
        fenced("wide.csv", tmp_path)


def test_images_behind_symbolic_links_are_read_but_no_other_linked_files(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in ("cats", "dogs"):
        (tmp_path / "store" / name).mkdir(parents=True)
        image.new("L", (6, 5), 255).save(tmp_path / "store" / name / "1.png")
    (tmp_path / "set" / "dogs").mkdir(parents=True)
    (tmp_path / "set" / "cats").symlink_to(tmp_path / "store" / "cats")
    (tmp_path / "set" / "dogs" / "1.png").symlink_to(tmp_path / "store" / "dogs" / "1.png")
    found = fenced("set", tmp_path)
    assert found.reading.words == ["cats", "dogs"]
    assert all(each["x"].min() == 1 for each in found.parts.values())
