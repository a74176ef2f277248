"""Unusual files are read correctly, or refused with the key that decides."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from tests.data.layouts import ASCII, LABELS, A, Layout, X, folders, images, npz, table, text
from tests.data.test_layouts import check, read_here

TWO = {"cats": 2, "dogs": 2}
FOUR = {"cats": 4, "dogs": 4}


def packed(folder: Path) -> Path:
    (folder / "d.csv").write_bytes(gzip.compress(table(ASCII).encode()))
    return folder / "d.csv"


def labelled(*labels: object) -> Layout:
    """Create a table with these labels, two of which look alike."""
    return Layout(text("d.csv", table(labels)), refused="look alike", asks="classes")


ODD: dict[str, Layout] = {
    # tables
    "labels in another case": labelled("Ant", "ant", "bee", "bee", "bee", "bee"),
    "truths in another case": labelled("TRUE", "False", "true", "False", "True", "FALSE"),
    "a label with a space of pages": labelled("ant\u00a0", "ant", "bee", "bee", "bee", "bee"),
    "a label with a letter without width": labelled("ant\u200b", "ant", "bee", "bee", "bee", "bee"),
    "labels in quotes behind spaces": labelled(' "ant"', " ant", " bee", " bee", " bee", " bee"),
    "two truths": Layout(text("d.csv", table(["TRUE", "False"] * 3)), rows=X, labels=["TRUE", "False"] * 3),
    "labels in another case, two by the key": Layout(
        text("d.csv", table(["A", "a"] * 3)), {"classes": "words"}, rows=X, labels=["A", "a"] * 3
    ),
    "a label of spaces": Layout(text("d.csv", table([*ASCII[:5], "  "])), refused="empty field"),
    "an error of Excel as label": Layout(
        text("d.csv", table([*ASCII[:5], "#VALUE!"])), refused="missing label", asks="classes"
    ),
    "pandas' missing label": Layout(
        text("d.csv", table([*ASCII[:5], "<NA>"])), refused="missing label", asks="classes"
    ),
    "points of thousands": Layout(
        text("d.csv", "a;label\n1.234;x\n2.345;y\n"), refused="1.234 or 1234", asks="decimal"
    ),
    "points of decimals by the key": Layout(
        text("d.csv", "a;label\n1.250;x\n2.500;y\n"), {"decimal": "."}, rows=[[1.25], [2.5]], labels="xy"
    ),
    "numbers of users, not each once": Layout(
        text("d.csv", table(names="user_id{0}b{0}label")), refused="'user_id'", asks="ignore"
    ),
    "numbers of passengers": Layout(
        text("d.csv", table(names="PassengerId{0}b{0}label")), refused="'PassengerId'", asks="ignore"
    ),
    "a word that ends in id": Layout(
        text("d.csv", table(ASCII, names="humid{0}b{0}label")), rows=X, labels=ASCII
    ),
    "a packed table without its ending": Layout(packed, refused="gzip", asks="unpack"),
    "a sheet of Excel called csv": Layout(text("d.csv", "PK\x03\x04"), refused="Excel sheet", asks="csv"),
    "a pointer of Git LFS": Layout(
        text("d.csv", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        refused="Git LFS",
        asks="git lfs pull",
    ),
    "lines that end in three ways": Layout(
        text("d.csv", "a,label\r\n1,x\n2,y\r3,x\n"), rows=[[1], [2], [3]], labels="xyx"
    ),
    # arrays
    "arrays with nan": Layout(
        npz(x=np.where(A > 7, np.nan, A), y=LABELS), refused="not finite", asks="fill in"
    ),
    "arrays with inf": Layout(
        npz(x=np.where(A > 7, np.inf, A), y=LABELS), refused="not finite", asks="fill in"
    ),
    "classes below 0": Layout(
        npz(x=A, y=np.array([-1, 1, -1, 1, 1, -1])), refused="the label -1", asks="from 0"
    ),
    # images
    "endings in capitals": Layout(
        images(*(each.replace("png", "PNG") for each in folders(""))), counts=TWO, shape=(3, 5, 6)
    ),
    "parts in capitals": Layout(images(*folders("Train/", "TEST/")), counts=FOUR, shape=(3, 5, 6)),
    "parts by another name": Layout(
        images(*folders("training_set/", "test_set/")), refused="may be a class", asks="ignore"
    ),
    "folders in another case": Layout(
        images(*folders("train/"), "test/Cats/1.png", "test/dogs/1.png"), refused="look alike", asks="classes"
    ),
    "images and masks": Layout(
        images("images/1.png", "masks/1.png"), refused="may be a class", asks="classes"
    ),
    "classes within groups": Layout(
        images(*folders("pets/", "toys/")), refused="folders within", asks="classes"
    ),
    "classes within groups, by the key": Layout(
        images(*folders("pets/", "toys/")),
        {"classes": ("pets", "toys")},
        counts={"pets": 4, "toys": 4},
        shape=(3, 5, 6),
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_file_is_read_correctly_or_refused_with_a_key(name: str, tmp_path: Path) -> None:
    check(ODD[name], tmp_path)


def test_images_outside_the_class_folders_are_reported(tmp_path: Path) -> None:
    found = read_here(images(*folders(""), "stray.png")(tmp_path))
    assert "1 images beside the folders of classes, such as 'stray.png'" in found.reading.skipped


def test_numbers_that_vanish_in_float32_are_reported(tmp_path: Path) -> None:
    found = read_here(text("d.csv", "a,label\n1e-50,x\n2e-50,y\n")(tmp_path))
    assert any("become 0: x is float32" in each for each in found.reading.notes)
