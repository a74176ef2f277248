"""Real nodes with a hostile member, each in its own process: none crashes, stalls or grows.

`tests.test_hostile_member` does it in virtual time, in every state of a run. This test runs with
PEERLOOM_PROCESSES=1, as in `make soak`, and `benchmarks/hostile.py --member` runs for ten minutes.
"""

import os

import pytest

from crypto.facts import IdentitySigner
from crypto.identity import Identity
from node.protocols.manifest import make_run
from node.storage.blobs import GUEST_BYTES_MAX
from tests.hostile.member_scene import member_run, member_scene
from tests.hostile.wire import PROTOCOLS, structs
from tests.stack import Tensors, assert_equal, reference, simple_cnn

SECONDS = 10.0
STEP_SECONDS_MAX = 0.05
GROWTH_BYTES_MAX = 100 << 20


pytestmark = pytest.mark.skipif(
    os.environ.get("PEERLOOM_PROCESSES") != "1", reason="six processes that load torch: PEERLOOM_PROCESSES=1"
)


@pytest.fixture(scope="module")
def expected() -> Tensors:
    return reference(make_run(IdentitySigner(Identity(bytes(32)), "any"), member_run()))


def test_nodes_survive_a_hostile_member_and_their_run_stays_exact(expected: Tensors) -> None:
    with member_scene(simple_cnn(), member_run()) as played:
        found = played.play(SECONDS)
    assert found.ended == []
    assert found.failures == {name: {} for name in found.failures}, found.logs
    assert found.unfinished == []
    assert set(found.outcomes) == {"done"}
    for result in found.results:
        assert_equal(result, expected, "float64")
    said = {name.split()[-1] for name in found.sent}
    kinds = {kind for each in PROTOCOLS for kind in (*structs(each.said), *structs(each.datagrams))}
    assert {kind.__name__ for kind in kinds} <= said
    step = found.longest_step
    assert step is None or step.cpu_seconds <= STEP_SECONDS_MAX, str(step)
    assert max(found.grown_bytes.values()) <= GROWTH_BYTES_MAX, found.grown_bytes
    assert max(found.disk_bytes.values()) <= GUEST_BYTES_MAX, found.disk_bytes
