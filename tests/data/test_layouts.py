"""Each layout of common programs is read correctly, or refused with the key that decides."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from node.content.sources import SampleParts, SourceWish, read
from node.errors import UsageError
from node.protocols.data_table import DataTable
from tests.data.layouts import LAYOUTS, Layout


def read_here(source: Path, **keys: Any) -> SampleParts:
    """Return the reading of a source with these keys of [data], done in this process."""
    table = msgspec.convert({"source": str(source), **keys}, DataTable)
    return read(SourceWish(str(source), source.parent, table))


def in_order(samples: SampleParts) -> tuple[list[list[float]], list[str | float]]:
    """Return rows and labels in the order of the source, with labels as words if they have names."""
    rows = {
        int(number): (arrays["x"][at].tolist(), arrays["y"][at].item())
        for part, arrays in samples.parts.items()
        for at, number in enumerate(samples.origins[part])
    }
    words = samples.reading.words
    pairs = [rows[number] for number in sorted(rows)]
    return [x for x, _ in pairs], [words[y] if words else y for _, y in pairs]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_read_correctly_or_refused_with_a_key(name: str, tmp_path: Path) -> None:
    check(LAYOUTS[name], tmp_path)


def check(layout: Layout, tmp_path: Path) -> None:
    """Read a layout, and compare the result with the expected one."""
    source = layout.write(tmp_path)
    if layout.refused:
        with pytest.raises(UsageError) as caught:
            read_here(source, **layout.keys)
        what, do = caught.value.written
        assert layout.refused in what
        assert str(source) in what
        assert layout.asks in (do or "")
        return
    found = read_here(source, **layout.keys)
    if layout.rows is not None:
        assert in_order(found) == (layout.rows, list(layout.labels))
    else:
        assert {each.word: each.samples for each in found.reading.classes} == layout.counts
        assert found.parts["train"]["x"].shape[1:] == layout.shape
    assert "\n".join(found.reading.lines())


def test_sixteen_bit_images_have_the_grey_levels_of_eight(tmp_path: Path) -> None:
    x = read_here(LAYOUTS["16 bits"].write(tmp_path)).parts["train"]["x"]
    np.testing.assert_allclose(x, 0.4, atol=1e-4)
