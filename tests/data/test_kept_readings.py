"""The requester stores how its data was read, and stores the files that lie with the weights."""

from pathlib import Path

import numpy as np
import pytest

from node.commands import Commands
from node.content.reading import kept_reading
from node.errors import UsageError
from node.requests import Prepared, read_request
from tests.data.model_folders import write_folder
from tests.stack import simple_cnn, simulate, swarm


def test_a_reading_is_kept_and_errors_name_the_users_file(tmp_path: Path) -> None:
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
            assert f"{tmp_path}/long.npz: x: numbers of type float128 cannot be sent" in str(caught.value)

    simulate(scenario)


def test_files_in_the_folder_of_the_weights_are_kept_with_the_run(tmp_path: Path) -> None:
    graph = tmp_path / "model.peerloom"
    graph.write_bytes(simple_cnn().data)
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"not kept")
    text = 'model = "m"\n[train]\nsteps = 1\nbatch = 16\n'

    async def scenario() -> None:
        async with swarm("a") as group:
            me = group.nodes["a"]
            commands = Commands(me)
            given = {
                "text": text,
                "name": "RUN.toml",
                "path": str(tmp_path / "RUN.toml"),
                "graph": str(graph),
            }
            handles = []
            for more in ({"folder": str(folder)}, {}):
                run = await commands.make_run(read_request(Prepared, given | more))
                await commands.submit(run, 0)
                handles.append(me.run(run.text))
                await handles[-1].result()
            (tmp_path / "out").mkdir()
            await commands.fetch(handles[0].id, str(tmp_path / "w"), str(tmp_path / "out"))
            for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
            assert not (tmp_path / "out" / "model.safetensors").exists()
            with pytest.raises(UsageError, match="keeps no Hugging Face folder"):
                await commands.fetch(handles[1].id, str(tmp_path / "w"), str(tmp_path / "out"))

    simulate(scenario)
