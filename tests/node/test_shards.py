"""Shards: packed samples are read back at every size, and a manifest from another peer is either valid or
refused."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from gossip.pieces.messages import PIECE_BYTES
from node.content.sharded import DataMissing, ShardedArrays, ShardReader
from node.content.shards import MANIFEST_BYTES_MAX, Array, DataManifest, PartName, hashes_of, pack
from node.storage.blobs import hash_of
from partition.plan.assignment import LANES

HASH = bytes(32)


def packed(
    parts: Mapping[PartName, Mapping[str, Array]],
) -> tuple[DataManifest, ShardReader, dict[bytes, bytes]]:
    blobs: dict[bytes, bytes] = {}

    def put(data: bytes) -> bytes:
        blobs[hash_of(data)] = data
        return hash_of(data)

    manifest, name = pack(parts, put)
    read: Any = decode(blobs[name], DataManifest, bytes_max=MANIFEST_BYTES_MAX)
    assert read == manifest
    hashes = {
        (part.name, shard): hashes_of(blobs[part.shards[shard]], manifest.pieces_of(part, shard))
        for part, shard, _ in manifest.shards()
    }
    return manifest, ShardReader(manifest, hashes, blobs.get, cache_bytes=0), blobs


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 900), st.integers(1, 1_500), st.booleans())
def test_every_sample_is_read_back(rows: int, width: int, is_fortran: bool) -> None:
    rng = np.random.default_rng(rows)
    x = rng.integers(-(2**31), 2**31, (rows, width), dtype=np.int32).astype(">i4")
    arrays = {
        "x": np.asfortranarray(x) if is_fortran else x,
        "flag": rng.random((rows, 2)) > 0.5,
        "y": rng.random(rows),
    }
    manifest, reader, blobs = packed({"train": arrays, "test": arrays})
    assert manifest.size_bytes == 2 * sum(array.nbytes for array in arrays.values())
    assert all(len(blob) <= PIECE_BYTES for name, blob in blobs.items() if name in reader.hashes["train", 0])
    found = ShardedArrays(reader, manifest.parts[0])
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name][:], array)
        np.testing.assert_array_equal(found[name][rows // 2], array[rows // 2])
        picked = rng.integers(0, rows, 5).tolist()
        np.testing.assert_array_equal(found[name][picked], array[picked])


def test_a_large_part_has_one_mixed_shard_for_each_lane() -> None:
    y = np.repeat(np.arange(4), 20_000)  # sorted by class
    x = np.zeros((80_000, 300), np.float32)
    manifest, reader, _ = packed({"train": {"x": x, "y": y}, "test": {"x": x[:2], "y": y[:2]}})
    part = manifest.parts[0]
    assert len(part.shards) == LANES
    assert sum(part.rows(shard) for shard in range(LANES)) == 80_000
    column = ShardedArrays(reader, part)["y"]
    assert set(column[list(range(7, 80_000, LANES * 50))].tolist()) == {0, 1, 2, 3}


def test_a_missing_piece_is_reported() -> None:
    manifest, reader, blobs = packed({"train": {"x": np.zeros((4, 2))}, "test": {"x": np.zeros((4, 2))}})
    blobs.clear()
    with pytest.raises(DataMissing):
        ShardedArrays(reader, manifest.parts[0])["x"][[1]]


COLUMN = ["x", "<f4", [2]]
PARTS = [["train", 4, [HASH]], ["test", 2, [HASH]]]
BAD: dict[str, Any] = {
    "no columns": [[], PARTS],
    "objects": [[["x", "|O", [2]]], PARTS],
    "a type in words": [[["x", "float32", [2]]], PARTS],
    "two columns of one name": [[COLUMN, COLUMN], PARTS],
    "no side": [[["x", "<f4", [0]]], PARTS],
    "a side of no machine": [[["x", "<f4", [2**39, 2**39]]], PARTS],
    "samples too large": [[["x", "<f8", [2**28]]], PARTS],
    "many sides": [[["x", "<f4", [1] * 17]], PARTS],
    "no test part": [[COLUMN], PARTS[:1]],
    "parts in another order": [[COLUMN], PARTS[::-1]],
    "a part twice": [[COLUMN], [PARTS[0], PARTS[0]]],
    "an unknown part": [[COLUMN], [PARTS[0], ["../x", 2, [HASH]]]],
    "no samples": [[COLUMN], [PARTS[0], ["test", 0, [HASH]]]],
    "three shards": [[COLUMN], [["train", 4, [HASH] * 3], PARTS[1]]],
    "more shards than lanes": [[COLUMN], [["train", 400, [HASH] * 128], PARTS[1]]],
    "more shards than samples": [[COLUMN], [["train", 4, [HASH] * 8], PARTS[1]]],
    "more than is taken": [[COLUMN], [["train", 2**39, [HASH] * 64], PARTS[1]]],
    "a short hash": [[COLUMN], [["train", 4, [HASH[:9]]], PARTS[1]]],
    "text of another column": [[COLUMN], PARTS, 7],
}


@pytest.mark.parametrize("case", BAD)
def test_a_malformed_data_manifest_is_refused(case: str) -> None:
    good: Any = decode(encode([[COLUMN], PARTS]), DataManifest, bytes_max=MANIFEST_BYTES_MAX)
    assert good.pieces == 2
    with pytest.raises(RemoteProtocolError):
        decode(encode(BAD[case]), DataManifest, bytes_max=MANIFEST_BYTES_MAX)


def test_a_list_of_another_length_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        hashes_of(HASH * 3, 2)
