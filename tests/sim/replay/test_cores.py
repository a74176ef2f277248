"""Every core that a node creates through its seams can be replayed: the cores are found in the source, and
played."""

import ast
from importlib import import_module
from pathlib import Path

import numpy as np

from gossip.pieces.messages import PIECE_BYTES
from node.content.datasets import load_folder
from node.recording.recorder import OUTBOXES, PARTS, Recorder
from sim.replay.player import CORES, play
from tests.source import ROOT
from tests.stack import manifest, simulate, swarm


def made_through_seams() -> dict[type, str]:
    """Return each core that a module of `node` creates with the `core` method of its seams, and the place in
    the source."""
    found: dict[type, str] = {}
    for file in sorted((ROOT / "node").rglob("*.py")):
        place = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for call in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args):
                continue
            if call.func.attr != "core" or "seams" not in ast.unparse(call.func.value):
                continue
            value: object = import_module(place)
            kind = call.args[0]
            if isinstance(kind, ast.Call) and ast.unparse(kind.func).endswith("seams.part"):
                kind = kind.args[0]  # a node uses a different class only if a program replaces this one
            for name in ast.unparse(kind).split("."):
                value = getattr(value, name)
            assert isinstance(value, type), f"{place}:{call.lineno}: {ast.unparse(call)}"
            found[value] = f"{place}:{call.lineno}"
    return found


def test_the_player_knows_every_core_made_through_seams() -> None:
    made = made_through_seams()
    assert len(made) >= 6, "the search finds nothing"
    unknown = {place for kind, place in made.items() if kind not in CORES.values()}
    assert not unknown


ONLY_TOLD = {
    ("records", "get"): "returns records",
    ("records", "watch_changes"): "only records what the disk must keep; no message depends on it",
    ("records", "take_changes"): "as watch_changes",
}
"""Calls of the surrounding code to parts of a core that are not recorded, with the reason why each cannot
change the core's answers."""


def shell_changes() -> dict[tuple[str, str], str]:
    """Return each part of a core that a module of `node` assigns to or calls, with its name and the place in
    the source."""
    found: dict[tuple[str, str], str] = {}
    for file in sorted((ROOT / "node").rglob("*.py")):
        if "recording" in file.parts:
            continue
        for each in ast.walk(ast.parse(file.read_text())):
            changed = each.func if isinstance(each, ast.Call) else each
            is_stored = isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
            if not (isinstance(changed, ast.Attribute) and (is_stored or isinstance(each, ast.Call))):
                continue
            part = changed.value
            whole = part.value if isinstance(part, ast.Attribute) else None
            if isinstance(part, ast.Attribute) and getattr(whole, "attr", "") in ("core", "_core"):
                found[part.attr, changed.attr] = f"{file.relative_to(ROOT)}:{changed.lineno}"
    return found


def test_changes_to_parts_of_a_core_from_outside_are_recorded() -> None:
    changes = shell_changes()
    assert ("saves", "every") in changes, "the search finds nothing"
    known = {*PARTS, *OUTBOXES, "plan"}
    unknown = {key: place for key, place in changes.items() if key[0] not in known and key not in ONLY_TOLD}
    assert not unknown


def test_transferred_data_replays_and_its_bytes_are_not_recorded(tmp_path: Path) -> None:
    rng, count = np.random.default_rng(1), 1_500
    for part in ("train", "test"):
        rows = count if part == "train" else 6
        np.savez(tmp_path / f"{part}.npz", x=rng.random((rows, 500)), y=np.arange(rows) % 3)
    recorders = {name: Recorder(tmp_path / f"{name}.record") for name in "ab"}

    async def scenario() -> None:
        async with swarm("ab", recorders=recorders) as group:
            a, b = group.nodes["a"], group.nodes["b"]
            here = load_folder(tmp_path)
            await b.runs.data.keep(here.digest, tmp_path)
            found = await a.runs.data.load(manifest(data=here.digest), [b.peer])
            assert found.digest == here.digest
            assert a.runs.data.exchange.downloaded_bytes > 10 * PIECE_BYTES

    simulate(scenario)
    for recorder in recorders.values():
        recorder.close()
        played = play(recorder.path)
        assert (played.diverged, played.damage) == ("", "")
        assert played.over == "the node has ended"
        assert played.turns["PieceSwarm"] > 10
        assert recorder.size_bytes < PIECE_BYTES
