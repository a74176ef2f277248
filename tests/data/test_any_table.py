"""Random tables in the formats of common programs are read back to the same rows and labels, or refused."""

import csv
import io
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.content.sources import SampleParts
from node.errors import UsageError
from tests.data.test_layouts import in_order, read_here

FEATURES = [
    "a",
    "b",
    "größe",
    "x",
    "x1",
    "id",
    "PassengerId",
    "index",
    "0",
    "1",
    "5.5",
    "sepal length",
    "NA",
    "y,z",
]
LABELS = ["label", "Label", "target", "class", "y", "kind", "species", "0", "z;w", "1_1"]
NUMBERS = st.one_of(
    st.integers(-3, 12).map(str),
    st.floats(-100, 100, width=16).map(lambda each: f"{each:.3f}"),
    st.sampled_from(
        ["1e-05", "+3", "007", ".5", "2.", "1_1", "", "NA", "nan", "1,234", "٣", "0x10", "1e999", "TRUE"]
    ),
)
WORDS = st.one_of(
    st.sampled_from(
        ["ant", "bee", "café", "1_1", "11", "1", "01", "1.0", "1.10", "1.1", "-1", "None", "NA", "a b", "5,5"]
    ),
    st.text("ab1_ .", min_size=1, max_size=3).filter(str.strip),
    st.integers(0, 3).map(str),
)


@dataclass(frozen=True)
class Table:
    """The content of a table: names and fields of the features, the label, and its column."""

    names: list[str]
    rows: list[list[str]]
    label: str
    words: list[str]
    place: int
    has_index: bool
    is_plain: bool
    """Whether all features are numbers."""

    def lines(self) -> list[list[str]]:
        rows = [self.names, *self.rows]
        columns = [self.label, *self.words]
        found = [
            [*row[: self.place], column, *row[self.place :]]
            for row, column in zip(rows, columns, strict=True)
        ]
        if self.has_index:
            found = [["" if not at else str(at - 1), *row] for at, row in enumerate(found)]
        return found


@st.composite
def tables(draw: st.DrawFn) -> Table:
    names = draw(st.lists(st.sampled_from(FEATURES), min_size=1, max_size=4, unique=True))
    count = draw(st.integers(2, 12))
    plain = draw(st.booleans())
    numbers = st.floats(-100, 100, width=16).map(lambda each: f"{each:.3f}") if plain else NUMBERS
    rows = draw(
        st.lists(st.lists(numbers, min_size=len(names), max_size=len(names)), min_size=count, max_size=count)
    )
    label = draw(st.sampled_from([each for each in LABELS if each not in names]))
    kinds = draw(st.lists(WORDS, min_size=1, max_size=4))
    words = draw(st.lists(st.sampled_from(kinds), min_size=count, max_size=count))
    return Table(names, rows, label, words, draw(st.integers(0, len(names))), draw(st.booleans()), plain)


def attempt(path: Path, table: Table, says_label: bool) -> SampleParts | None:
    """Return the reading of a file; None if it is refused. Features that are words may look like the
    label."""
    keys = {"label": table.label} if says_label or not table.is_plain else {}
    try:
        return read_here(path, **keys)
    except UsageError as error:
        if str(path) not in str(error):
            raise
        return None


def as_meant(table: Table, samples: SampleParts) -> None:
    rows, labels = in_order(samples)
    assert samples.reading.features == table.names
    assert samples.reading.column == table.label
    assert len(rows) == len(table.rows)
    for row, meant in zip(rows, table.rows, strict=True):
        assert row == pytest.approx([float(each) for each in meant], rel=1e-6)
    for found, word in zip(labels, table.words, strict=True):
        assert found == word or float(word) == pytest.approx(found, rel=1e-6)
        assert found == word or "_" not in word
    assert len(set(labels)) == len(set(table.words)), "two words belong to two classes"


@settings(max_examples=80, deadline=None)
@given(
    tables(),
    st.sampled_from(",;\t|"),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "cp1252"]),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
    st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_NONNUMERIC, csv.QUOTE_ALL]),
)
def test_a_table_of_text_is_read_correctly_or_refused(
    table: Table, separator: str, encoding: str, end: str, says_label: bool, quoting: int
) -> None:
    file = io.StringIO()
    csv.writer(file, delimiter=separator, lineterminator=end, quoting=quoting).writerows(table.lines())  # type: ignore[arg-type]  # a constant of csv
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "d.csv"
        path.write_bytes(file.getvalue().encode(encoding, errors="replace"))
        found = attempt(path, table, says_label)
        if found is None:
            return
        if encoding == "cp1252" and not file.getvalue().isascii():
            pytest.fail("bytes that are not UTF-8 were read without a key")
        as_meant(table, found)


@settings(max_examples=20, deadline=None)
@given(tables(), st.booleans())
def test_a_parquet_table_is_read_correctly_or_refused(table: Table, says_label: bool) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    lines = table.lines()
    columns: dict[str, list[float | str]] = {}
    for at, name in enumerate(lines[0]):
        fields = [row[at] for row in lines[1:]]
        try:
            columns[name or "__index_level_0__"] = [
                float(each) if name != table.label else each for each in fields
            ]
        except ValueError:
            columns[name] = [*fields]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "d.parquet"
        parquet.write_table(pyarrow.table(columns), path)
        found = attempt(path, table, says_label)
        if found is None:
            return
        as_meant(table, found)
