"""A stage's process does not load torch's compiler until it is needed."""

import subprocess
import sys

import pytest

from tests.source import ROOT

SCRIPT = """
import sys
import torch
from partition.execute import defer_compiler, prepare_process
from partition.execute.process import load_operators

defer_compiler()
prepare_process(1)
load_operators(torch.device("cpu"))
assert torch.are_deterministic_algorithms_enabled()
print([name for name in ("torch._dynamo.eval_frame", "torch._inductor") if name in sys.modules])
torch._dynamo.reset()  # which is no part of what was loaded
print(torch.compile(lambda value: value + 1, backend="eager")(torch.ones(1)).item())
"""


@pytest.mark.slow
def test_torchs_compiler_is_loaded_only_on_demand() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.stdout.split("\n") == ["[]", "2.0", ""], done.stderr
