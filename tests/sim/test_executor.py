"""A simulated stage reports the computing time of its model."""

import numpy as np
import torch

from crypto.encoding import encode
from partition.codecs.codec import pack, typed
from partition.stage import Applied, Apply, Forget, Forward, Forwarded, Request, StageDone, StageSpecification
from sim.executor import SimExecutor
from tests.partition.hand_models import gpt_graph
from tests.partition.held import spread
from tests.stack import simulate

torch.set_num_threads(1)


def seconds(request: Request) -> float:
    return 0.25 if isinstance(request, Forward) else 1.5


def test_a_simulated_stages_reply_has_the_models_computing_time() -> None:
    async def scenario() -> None:
        first, _ = spread(gpt_graph(30, 8, 16, 2, 2, 0.25), 2)
        stage = await SimExecutor(seconds).open_stage(encode(StageSpecification(b"run", first, (2, 8))))
        tokens = pack([typed(np.zeros((2, 8), dtype="int64"))], "raw", (2, 8))
        forwarded = await stage.call(Forward(0, 0, True, tokens))
        assert isinstance(forwarded, Forwarded)
        assert forwarded.busy_nanoseconds == 250_000_000
        assert await stage.call(Forget(0, 0)) == StageDone()
        applied = await stage.call(Apply(0, 1))
        assert isinstance(applied, Applied)
        assert applied.busy_nanoseconds == 1_500_000_000
        await stage.aclose()

    simulate(scenario)
