"""A file that could be read as a table needs a decision before it is read as bytes."""

import struct
from pathlib import Path

import numpy as np
import pytest

from node.main import run
from tests.data.layouts import images
from tests.data.test_layouts import read_here

ROWS = "".join(f"{5 + n % 3}.1,3.5,1.4,Iris-{'ab'[n % 2]}\n" for n in range(40))
COLUMNS = "".join(f" 0.00{n}  18.00   2.310  0\n" for n in range(40))
SPARSE = "".join(f"{n % 2} 1:{n} 3:0.5\n" for n in range(40))
WEKA = "@RELATION iris\n@ATTRIBUTE a real\n@DATA\n" + "1,2\n" * 50
MNIST = struct.pack(">IIII", 0x803, 4, 28, 28) + bytes(3136)


@pytest.mark.parametrize(
    ("name", "content", "said", "do"),
    [
        ("iris.data", ROWS.encode(), "rows of 4 fields (comma between them)", 'form = "table"'),
        ("housing.txt", COLUMNS.encode(), "rows of 4 fields (space between them)", 'form = "bytes"'),
        ("a.libsvm", SPARSE.encode(), "sparse rows", "load_svmlight_file"),
        ("iris.arff", WEKA.encode(), "ARFF", "csv"),
        ("train-images.idx3-ubyte", MNIST, "not text: it has the byte 0x00", "FILE.py:FUNCTION"),
        ("numbers.bin", np.arange(99, dtype=np.float32).tobytes(), "not text", 'form = "bytes"'),
        ("wide.txt", ("hello " * 60).encode("utf-16"), "UTF-16", "save it as UTF-8"),
        ("d.jsonl", b'{"a": 1}\n' * 30, "records are read for", 'form = "bytes"'),
    ],
)
def test_an_ambiguous_text_is_refused_until_a_key_decides(
    name: str,
    content: bytes,
    said: str,
    do: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content)
    assert run(["data", "show", name]) == 2
    error = capsys.readouterr().err
    assert name in error
    assert said in error
    assert do in error
    assert run(["data", "show", name, "--form", "bytes"]) == 0


@pytest.mark.parametrize(
    "content",
    [
        "Once upon a time, there was\na king, and no queen\nlived there\n" * 9,
        "<p>1</p>\n" * 99,
        "1\n2\n3\n" * 99,
    ],
)
def test_an_unambiguous_text_is_read_as_text(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.txt").write_text(content)
    assert run(["data", "show", str(tmp_path / "t.txt")]) == 0
    assert "its bytes in windows" in capsys.readouterr().out


def test_all_images_that_pillow_reads_become_samples(tmp_path: Path) -> None:
    paths = [f"{name}/{n}.{suffix}" for name in "ab" for n, suffix in enumerate(("png", "tif", "gif", "pgm"))]
    found = read_here(images(*paths)(tmp_path))
    assert {each.word: each.samples for each in found.reading.classes} == {"a": 4, "b": 4}
