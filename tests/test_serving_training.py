"""Real nodes that train a run while they answer: the run ends with the weights of one that was alone there,
each answer is the undisturbed one, and no node has more stages than its owner gave slots.
"""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.kills import Command
from tests.serving_swarm import Ground, Streams
from tests.stack import assert_equal, simple_cnn

STEPS = 6
STREAMS = 4
TOKENS = 40
SLOTS = 2


def train(ground: Ground, folder: Path, streams: Streams | None) -> dict[str, np.ndarray]:
    """The weights of a run on both nodes."""
    (folder / "tmp").mkdir(parents=True)
    (folder / "model.peerloom").write_bytes(simple_cnn().data)
    command = Command(folder, ground.door, steps=STEPS, replicas=2, more="")
    try:
        while command.process.poll() is None:
            for name in ground.names:
                assert len(ground.processes(name)) <= SLOTS + 1, "one more may be loaded and wait"
            if streams is not None:
                streams.flow()
            else:
                command.process.wait()
        assert command.end() == 0, command.errors
    finally:
        command.close()
    return dict(load_file(command.out))


@pytest.mark.slow
def test_a_run_stays_exact_beside_answers_of_its_nodes(tmp_path: Path) -> None:
    ground = Ground(tmp_path / "nodes", dict.fromkeys("ab", (SLOTS, 1)))
    (tmp_path / "nodes").mkdir()
    try:
        ground.start()
        alone = train(ground, tmp_path / "alone", None)
        ground.serve("words", "a")
        streams = Streams(ground.door, ("words",), STREAMS, TOKENS)
        streams.begin()
        beside = train(ground, tmp_path / "beside", streams)
        streams.stop()
        assert streams.answers
        assert_equal(beside, alone, "float64")
    finally:
        ground.close()
