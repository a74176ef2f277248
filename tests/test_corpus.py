"""Models of other libraries, from capture to stages: two kinds here, twenty-five with PEERLOOM_CORPUS=sample.

`benchmarks/corpus.py` examines all listed models, and writes docs/corpus.md. Two nodes also train each model.
"""

import os
import sys
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import corpus

SMALL = ("vit",)
"""The sample also includes a model that needs the remedy named in its refusal."""
SAMPLED = corpus.SAMPLE.split() if os.environ.get("PEERLOOM_CORPUS") == "sample" else SMALL
CASES = [
    (kind, name)
    for kind, names in corpus.FAMILIES.items()
    for name in names.split()
    if name in SAMPLED and kind != "vision"
]


@pytest.mark.parametrize(("kind", "name"), CASES, ids=[name for _, name in CASES])
def test_a_library_model_trains_equally_in_stages_and_in_one_process(kind: str, name: str) -> None:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = corpus.examine(kind, name)
    if not row["exported"]:
        pytest.skip(row["why"])
    assert (row["captured"], row["trained"], row["silent"]) == (True, True, False), row["why"]
    assert corpus.is_equal_on_nodes(found := row | corpus.on_nodes(kind, name, row)), found["nodes"]
    assert row.get("remedy", "") == ("batched_mm" if name == "mixtral" else "")
    if name == "mixtral":
        assert "module 'model.model.layers.0.mlp.experts' (transformers/" in row["refusal"]
        assert 'config._experts_implementation = "batched_mm"' in row["refusal"]


def test_a_refused_model_is_accepted_after_applying_the_named_remedy() -> None:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = corpus.examine("causal", "xmod")
    assert (row["exported"], row["captured"], row["rewritten"]) == (True, False, "proved")
    assert "x = torch.where(mask, f(x), x)" in row["why"]
