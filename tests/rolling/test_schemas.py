"""A protocol with a changed message gets a new name, and its previous name is served for one version."""

import re
import tarfile
from collections.abc import Collection

from tests.hostile.wire import INSIDE, PROTOCOLS
from tests.rolling.schemas import (
    ARCHIVE,
    COMPATIBLE,
    FORMER_NAMES,
    UNNAMED,
    Record,
    as_before,
    changes,
    previous,
    record,
    undeclared,
)

TO_DO = """a message changed, and nodes of the version before would read it by its old form.
  do: raise the protocol's name (/peerloom/x/1 to /peerloom/x/2) and serve both (CONTRIBUTING.md, "Protocols")
  or, where the version before is not misled, say why in COMPATIBLE of tests/rolling/schemas.py:
"""
NAME = re.compile(r"^\w+ = \"(/peerloom/[a-z]+/\d+)\"", re.MULTILINE)


def raised(name: str, names: Collection[str]) -> str:
    """Return the name of a later version of a protocol, "" if there is none; several versions may have passed
    between releases."""
    path, _, version = name.rpartition("/")
    parts = [(each.rpartition("/"), each) for each in names]
    return next((each for (p, _, v), each in parts if p == path and int(v) > int(version)), "")


def test_a_protocol_with_a_changed_message_has_a_higher_version() -> None:
    found = undeclared()
    assert not found, TO_DO + "\n".join(found)


def test_each_compatibility_reason_belongs_to_a_real_change() -> None:
    before, now = previous(), as_before(record())
    assert set(FORMER_NAMES.values()) <= {name for said in before.values() for name in said}
    for name, reasons in COMPATIBLE.items():
        assert name in before, f"{name} is new, so it needs no reason"
        assert reasons.keys() <= set(changes(before[name], now[name])), name


def test_a_protocol_is_also_served_under_its_previous_name() -> None:
    now = {each.name: each for each in PROTOCOLS}
    gone = previous().keys() - now.keys() - UNNAMED.keys()
    for name in gone:
        later = raised(name, now)
        assert later, f"{name} has no next version"
        assert now[later].former == name, f"{name} is not served any more"
    assert {each.former for each in PROTOCOLS if each.former} == gone, (
        "a name older than the previous version is still served"
    )


def test_the_archive_and_the_record_are_of_the_same_version() -> None:
    names = set()
    with tarfile.open(ARCHIVE) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.name.endswith(".py") else None
            if file is not None:
                names.update(NAME.findall(file.read().decode()))
    assert names == previous().keys() - UNNAMED.keys()


def test_the_record_contains_everything_that_is_decoded() -> None:
    recorded = {name for structs in record().values() for name in structs}
    assert {each.__name__ for several in INSIDE.values() for each in several} <= recorded


def test_every_kind_of_change_is_found() -> None:
    before: Record = {"A": ["A: array, tag a", "A.x: int; required", "A.y: text; required"], "B": ["B: map"]}
    x, y = before["A"][1:]

    def found(*lines: str, **more: list[str]) -> list[str]:
        return changes(before, {"A": list(lines), "B": ["B: map"]} | more)

    assert found("A: array, tag a", x, y) == []
    assert found("A: array, tag b", x, y) == ["A: array, tag b"]
    assert found("A: array, tag a", x) == [f"- {y}"]
    assert found("A: array, tag a", "A.x: int; without it `0`", y) == ["A.x: int; without it `0`"]
    assert found("A: array, tag a", x, y, "A.z: int; required") == ["A.z: int; required"]
    assert found("A: array, tag a", y, x) == ["- A: the order of its fields has changed"]
    assert "- A: the order of its fields has changed" in found("A: array, tag a", x, "A.z: int; required", y)
    assert found("A: array, tag a", x, y, C=["C: map"]) == ["C: new"]
    assert changes(before, {"A": before["A"]}) == ["- B: map"]
