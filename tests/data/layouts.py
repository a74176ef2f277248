"""Small files in the layouts of common programs, and the expected reading of each.

Sources: the documents of torchvision's `ImageFolder`, Keras' `image_dataset_from_directory` and data sets,
fastai's `ImageDataLoaders.from_folder`, Hugging Face's `imagefolder` and `datasets`, MedMNIST, pandas, R,
numpy, Excel, SQL tools. A layout must be read correctly, or refused with a key to set.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

X = [[1.5, 2.0], [2.5, 3.0], [0.5, 1.0], [4.0, 5.0], [6.0, 7.25], [8.0, 9.0]]
WORDS = ["ant", "bee", "ant", "café", "bee", "ant"]
ASCII = ["ant", "bee", "ant", "cow", "bee", "ant"]
NUMBERS = [0, 1, 0, 2, 1, 0]

Write = Callable[[Path], Path]


@dataclass(frozen=True)
class Layout:
    """`write` creates the source in an empty folder. With `keys` the reader must return `rows` of x and
    `labels` (words or numbers). Otherwise it must refuse the source with an error that contains `refused` and
    names the key `asks`.
    """

    write: Write
    keys: dict[str, Any] = field(default_factory=dict)
    rows: Sequence[Sequence[float]] | None = None
    labels: Sequence[str | float] = ()
    counts: dict[str, int] = field(default_factory=dict)
    shape: tuple[int, ...] = ()
    refused: str = ""
    asks: str = ""


def text(name: str, content: str, encoding: str = "utf-8") -> Write:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content.encode(encoding))
        return folder / name

    return write


def table(
    labels: Sequence[object] = WORDS,
    *,
    separator: str = ",",
    decimal: str = ".",
    end: str = "\n",
    names: str | None = "a{0}b{0}label",
    index: Sequence[object] | None = None,
    quote: str = "",
    number: str = "{:g}",
) -> str:
    """Return the rows of X and their labels as a table of text."""
    lines = [] if names is None else [names.format(separator)]
    for row, (numbers, label) in enumerate(zip(X, labels, strict=True)):
        fields = [number.format(each).replace(".", decimal) for each in numbers] + [f"{quote}{label}{quote}"]
        lines.append(separator.join([*([f"{quote}{index[row]}{quote}"] if index else []), *fields]))
    return end.join(lines) + end


def npz(**arrays: Any) -> Write:
    def write(folder: Path) -> Path:
        np.savez(folder / "d.npz", **arrays)
        return folder / "d.npz"

    return write


def tensors(**arrays: Any) -> Write:
    def write(folder: Path) -> Path:
        safetensors.numpy.save_file(arrays, folder / "d.safetensors")
        return folder / "d.safetensors"

    return write


def parquet(columns: dict[str, Any], **metadata: Any) -> Write:
    def write(folder: Path) -> Path:
        pyarrow = pytest.importorskip("pyarrow")
        files = pytest.importorskip("pyarrow.parquet")
        told = {name: json.dumps(value) for name, value in metadata.items()}
        files.write_table(pyarrow.table(columns).replace_schema_metadata(told), folder / "d.parquet")
        return folder / "d.parquet"

    return write


def images(*paths: str, bits: int = 8, extra: dict[str, str] | None = None) -> Write:
    """Create images of 6 x 5 pixels at these paths, each 40 % grey, and texts at the other paths."""

    def write(folder: Path) -> Path:
        image = pytest.importorskip("PIL.Image")
        for path in paths:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            level = np.full((5, 6), 0.4 * (2**bits - 1), np.uint16 if bits == 16 else np.uint8)
            image.fromarray(level).save(folder / path)
        for name, content in (extra or {}).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if name.endswith("/"):
                (folder / name).mkdir(exist_ok=True)
            else:
                (folder / name).write_text(content)
        return folder

    return write


PIXELS = np.arange(6 * 28 * 28, dtype=np.uint8).reshape(6, 28, 28)
LABELS = np.array(NUMBERS, np.uint8)
A = np.array(X, np.float32)
CATS = [f"{part}cats/{n}.png" for part in ("", "train/", "test/", "valid/", "val/") for n in (1, 2)]
PANDAS_INDEX = {"index_columns": ["__index_level_0__"], "columns": []}
CLASS_NAMES = {"info": {"features": {"label": {"names": ["ant", "bee", "cow"], "_type": "ClassLabel"}}}}


def folders(*parts: str) -> list[str]:
    """Create two images of each of two classes in each part."""
    return [f"{part}{name}/{n}.png" for part in parts for name in ("cats", "dogs") for n in (1, 2)]


TWO = {"cats": 2, "dogs": 2}
LAYOUTS: dict[str, Layout] = {
    # Excel: five locales, and its default conversions
    "excel en-US": Layout(text("d.csv", table(end="\r\n"), "utf-8-sig"), rows=X, labels=WORDS),
    "excel de-DE": Layout(
        text("d.csv", table(separator=";", decimal=",", end="\r\n"), "utf-8-sig"), rows=X, labels=WORDS
    ),
    "excel fr-FR, old encoding": Layout(
        text("d.csv", table(separator=";", decimal=",", end="\r\n"), "cp1252"),
        refused="not utf-8",
        asks="encoding",
    ),
    "excel fr-FR, with the key": Layout(
        text("d.csv", table(separator=";", decimal=",", end="\r\n"), "cp1252"),
        {"encoding": "cp1252"},
        rows=X,
        labels=WORDS,
    ),
    "excel ja-JP, unicode text": Layout(
        text("d.csv", table(["蟻", "蜂", "蟻", "牛", "蜂", "蟻"], separator="\t", end="\r\n"), "utf-16"),
        rows=X,
        labels=["蟻", "蜂", "蟻", "牛", "蜂", "蟻"],
    ),
    "excel pl-PL, old encoding": Layout(
        text("d.csv", table(["żaba"] * 3 + ["kot"] * 3, separator=";", decimal=","), "cp1250"),
        {"encoding": "cp1250"},
        rows=X,
        labels=["żaba"] * 3 + ["kot"] * 3,
    ),
    "excel's line sep=": Layout(
        text("d.csv", "sep=;\r\n" + table(separator=";", end="\r\n")), rows=X, labels=WORDS
    ),
    "excel's empty rows and columns": Layout(
        text(
            "d.csv",
            "a;b;label;;\r\n"
            + "".join(f"{a:g};{b:g};{c};;\r\n" for (a, b), c in zip(X, ASCII, strict=True))
            + ";;;;\r\n",
        ),
        {"decimal": "."},
        rows=X,
        labels=ASCII,
    ),
    "utf-16 without its mark": Layout(
        text("d.csv", table(ASCII), "utf-16-le"), refused="UTF-16", asks="encoding"
    ),
    "thousands, or decimals": Layout(
        text("d.csv", "a;label\n1,234;x\n2,345;y\n"), refused="1.234 or 1234", asks="decimal"
    ),
    # pandas
    "pandas to_csv": Layout(
        text("d.csv", table(names="{0}a{0}b{0}label", index=range(6))), rows=X, labels=WORDS
    ),
    "pandas to_csv, shuffled": Layout(
        text("d.csv", table(names="{0}a{0}b{0}label", index=[7, 3, 9, 1, 12, 0])), rows=X, labels=WORDS
    ),
    "pandas to_csv, saved twice": Layout(
        text("d.csv", table(names="Unnamed: 0{0}a{0}b{0}label", index=range(6))), rows=X, labels=WORDS
    ),
    "pandas to_csv without index": Layout(text("d.csv", table()), rows=X, labels=WORDS),
    "pandas to_csv by tabs": Layout(text("d.tsv", table(separator="\t")), rows=X, labels=WORDS),
    "pandas with numbered columns": Layout(text("d.csv", table(names="0{0}1{0}label")), rows=X, labels=WORDS),
    "pandas with a column id": Layout(
        text("d.csv", table(names="id{0}a{0}b{0}label", index=range(6))), refused="'id'", asks="ignore"
    ),
    "an index that is none": Layout(
        text("d.csv", table(names="{0}a{0}b{0}label", index=[1, 1, 2, 2, 3, 3])),
        refused="index",
        asks="ignore",
    ),
    # R
    "R write.csv": Layout(
        text("d.csv", table(names='""{0}"a"{0}"b"{0}"label"', index=range(1, 7), quote='"')),
        rows=X,
        labels=WORDS,
    ),
    "R write.csv2": Layout(
        text(
            "d.csv",
            table(names='""{0}"a"{0}"b"{0}"label"', index="uvwxyz", quote='"', separator=";", decimal=","),
        ),
        rows=X,
        labels=WORDS,
    ),
    "R write.table": Layout(
        text("d.csv", table(names='"a"{0}"b"{0}"label"', index=range(1, 7), quote='"', separator=" ")),
        refused="fields",
        asks="separator",
    ),
    # numpy
    "numpy savetxt": Layout(
        text("d.csv", table([f"{n:.18e}" for n in NUMBERS], names=None, separator=" ", number="{:.18e}")),
        refused="sample",
        asks="header",
    ),
    "numpy savetxt, with the keys": Layout(
        text("d.csv", table([f"{n:.18e}" for n in NUMBERS], names=None, separator=" ", number="{:.18e}")),
        {"header": False, "label": "column_3", "classes": "numbers"},
        rows=X,
        labels=NUMBERS,
    ),
    # SQL tools, and others
    "psql copy": Layout(text("d.csv", table(names="a{0}b{0}species")), rows=X, labels=WORDS),
    "sqlite list": Layout(text("d.csv", table(separator="|")), rows=X, labels=WORDS),
    "mysql with nulls": Layout(
        text("d.csv", table([*WORDS[:5], "\\N"], separator="\t")), refused="missing label", asks="classes"
    ),
    "uci iris.data": Layout(text("d.csv", table(names=None)), refused="sample", asks="header"),
    "uci iris.data, with the keys": Layout(
        text("iris.data", table(names=None)), {"header": False, "label": "column_3"}, rows=X, labels=WORDS
    ),
    "a packed table": Layout(text("d.csv.gz", table()), {"label": "label"}, refused=".gz", asks="unpack"),
    "a table of a spreadsheet": Layout(
        text("d.xlsx", table()), {"label": "label"}, refused=".xlsx", asks="save the sheet as csv"
    ),
    "words that look alike": Layout(
        text("d.csv", table(["cafe\u0301", "café"] * 3)), refused="look alike", asks="classes"
    ),
    "uci with spaces": Layout(
        text("d.csv", table(separator=", ")), rows=X, labels=[f" {each}" for each in WORDS]
    ),
    "kaggle digits": Layout(
        text(
            "d.csv",
            "label,p0,p1\n" + "".join(f"{y},{a:g},{b:g}\n" for y, (a, b) in zip(NUMBERS, X, strict=True)),
        ),
        rows=X,
        labels=NUMBERS,
    ),
    "kaggle titanic": Layout(
        text("d.csv", "PassengerId,Survived,Pclass,Name,Age\n1,0,3,Owen,22\n2,1,1,Florence,38\n"),
        refused="which column is the label",
        asks="label",
    ),
    "diamonds": Layout(
        text("d.csv", "carat,cut,x,y,z\n0.2,Ideal,3,4,2\n0.3,Good,3,4,2\n0.3,Good,3,4,2\n"),
        refused="which column is the label",
        asks="label",
    ),
    "class names like numbers": Layout(
        text("d.csv", table(["1_1", "11", "1_11", "11_1", "1_1", "11"])),
        rows=X,
        labels=["1_1", "11", "1_11", "11_1", "1_1", "11"],
    ),
    "class names with zeros": Layout(
        text("d.csv", table(["01", "1", "01", "1", "01", "1"])), refused="one number", asks="classes"
    ),
    "ages": Layout(text("d.csv", table([31, 44, 31, 58, 44, 31])), refused="from 31 to 58", asks="amounts"),
    "classes from 1": Layout(text("d.csv", table([1, 2, 1, 3, 2, 1])), rows=X, labels=[1, 2, 1, 3, 2, 1]),
    "classes of a machine": Layout(
        text("d.csv", table([-1, 1, -1, 1, 1, 1])),
        {"classes": "words"},
        rows=X,
        labels=["-1", "1", "-1", "1", "1", "1"],
    ),
    "prices": Layout(
        text("d.csv", table([12.5, 99.0, 14.25, 7.0, 8.5, 3.0])),
        rows=X,
        labels=[12.5, 99.0, 14.25, 7.0, 8.5, 3.0],
    ),
    "missing values": Layout(
        text("d.csv", table().replace("2.5,3", "2.5,")), refused="no number", asks="ignore"
    ),
    # arrays
    "keras": Layout(
        npz(x_train=PIXELS, y_train=LABELS, x_test=PIXELS[:2], y_test=LABELS[:2]),
        counts={"0": 4, "1": 3, "2": 1},
        shape=(28, 28),
    ),
    "medmnist": Layout(
        npz(
            **{f"{part}_images": PIXELS for part in ("train", "val", "test")},
            **{f"{part}_labels": LABELS[:, None] for part in ("train", "val", "test")},
        ),
        counts={"0": 9, "1": 6, "2": 3},
        shape=(28, 28),
    ),
    "x and y": Layout(npz(x=A, y=LABELS), rows=X, labels=NUMBERS),
    "data and target": Layout(npz(data=A, target=LABELS), rows=X, labels=NUMBERS),
    "pictures with channels last": Layout(
        npz(x=np.zeros((6, 28, 28, 3), np.uint8), y=LABELS), refused="channels", asks="channels"
    ),
    "safetensors": Layout(tensors(x=A, y=LABELS), rows=X, labels=NUMBERS),
    "arrays of parts beside others": Layout(
        npz(x_train=A, y_train=LABELS, mean=A), refused="name parts", asks="ignore"
    ),
    # Parquet
    "parquet of pandas": Layout(
        parquet(
            {"a": A[:, 0], "b": A[:, 1], "label": WORDS, "__index_level_0__": range(6)}, pandas=PANDAS_INDEX
        ),
        rows=X,
        labels=WORDS,
    ),
    "parquet of strings that are digits": Layout(
        parquet({"a": A[:, 0], "b": A[:, 1], "label": ["1", "11", "1", "2", "11", "1"]}),
        rows=X,
        labels=["1", "11", "1", "2", "11", "1"],
    ),
    "parquet of hugging face": Layout(
        parquet({"a": A[:, 0], "b": A[:, 1], "label": NUMBERS}, huggingface=CLASS_NAMES), rows=X, labels=ASCII
    ),
    "parquet of pictures": Layout(
        parquet({"image": [{"bytes": b"png"}] * 6, "label": NUMBERS}), refused="image", asks="ignore"
    ),
    # images
    "torchvision": Layout(images(*folders("")), counts=TWO, shape=(3, 5, 6)),
    "torchvision, nested": Layout(
        images("cats/a/1.png", "cats/b/2.png", *folders("")[2:]), counts=TWO, shape=(3, 5, 6)
    ),
    "fastai train and valid": Layout(
        images(*folders("train/", "valid/")), counts={"cats": 4, "dogs": 4}, shape=(3, 5, 6)
    ),
    "hugging face imagefolder": Layout(
        images(*folders("train/", "test/", "validation/")), counts={"cats": 6, "dogs": 6}, shape=(3, 5, 6)
    ),
    "jupyter's folder": Layout(
        images(*folders(""), ".ipynb_checkpoints/1.png", "cats/.ipynb_checkpoints/1.png"),
        counts=TWO,
        shape=(3, 5, 6),
    ),
    "a Mac's zip": Layout(
        images(*folders(""), "__MACOSX/cats/1.png", extra={"cats/.DS_Store": "x", "cats/._1.png": "x"}),
        counts=TWO,
        shape=(3, 5, 6),
    ),
    "16 bits": Layout(images(*folders(""), bits=16), counts=TWO, shape=(3, 5, 6)),
    "numbered folders": Layout(
        images(*[f"{n}/1.png" for n in range(11)]), refused="alphabet", asks="classes"
    ),
    "a folder without images": Layout(
        images(*folders(""), extra={"old/notes.txt": "x"}), refused="without images", asks="ignore"
    ),
    "a list beside images": Layout(
        images("a/1.png", "b/1.png", extra={"metadata.csv": "file_name,label\n"}),
        refused="metadata.csv",
        asks="folder",
    ),
}
LAYOUTS |= {
    "pictures of a phone": Layout(
        images(*folders(""), extra={"cats/3.heic": "x"}), refused="which is not read", asks="convert them"
    ),
    "sounds in folders": Layout(
        images(extra={"yes/1.wav": "x", "no/1.wav": "x"}),
        refused="which is not read",
        asks="FILE.py:FUNCTION",
    ),
}
