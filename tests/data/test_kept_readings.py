"""The node that asks for a run keeps how its data was read."""

from pathlib import Path

import numpy as np
import pytest

from node.content.reading import kept_reading
from node.errors import UsageError
from tests.stack import simple_cnn, simulate, swarm


def test_a_reading_is_kept_with_the_run_and_errors_name_the_persons_file(tmp_path: Path) -> None:
    model = tmp_path / "model.peerloom"
    model.write_bytes(simple_cnn().data)
    rng = np.random.default_rng(1)
    labels = np.arange(80)[:, None] % 10
    np.savez(tmp_path / "d.npz", train_images=rng.random((80, 1, 8, 8)), train_labels=labels)
    np.savez(tmp_path / "long.npz", x=np.zeros((8, 1, 8, 8), np.longdouble), y=np.arange(8))

    async def scenario() -> None:
        async with swarm("a") as group:
            me = group.nodes["a"]
            data = str(tmp_path / "d.npz")
            run = await me.train(str(model), data=data, steps=1, batch=16, microbatch=16)
            reading = await kept_reading(me.seams, run.id)
            assert reading is not None
            assert reading.source == data
            assert "'images' is x, 'labels' is y" in reading.notes
            assert sum(each.samples for each in reading.classes) == 80
            await run.result()
            with pytest.raises(UsageError) as caught:
                await me.train(str(model), data=str(tmp_path / "long.npz"), steps=1)
            assert f"{tmp_path}/long.npz: x: numbers of type float128 do not travel" in str(caught.value)

    simulate(scenario)
