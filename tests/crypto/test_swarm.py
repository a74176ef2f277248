"""The secrets of swarms: separate by name and by key, in the order of the keys."""

import pytest

from crypto.errors import LocalProtocolError
from crypto.swarm import Swarm

ONE, OTHER = b"1" * 32, b"2" * 32


def test_swarms_have_separate_secrets() -> None:
    swarms = [Swarm("a"), Swarm("b"), Swarm("a", (ONE,)), Swarm("b", (ONE,)), Swarm("a", (OTHER,))]
    assert len({swarm.secrets for swarm in swarms}) == len(swarms)
    assert [swarm.is_private for swarm in swarms] == [False, False, True, True, True]


def test_a_rotation_keeps_the_secrets_of_each_key() -> None:
    both = Swarm("a", (ONE, OTHER))
    assert both.secrets == Swarm("a", (ONE,)).secrets + Swarm("a", (OTHER,)).secrets


@pytest.mark.parametrize("keys", [(b"short",), (ONE,) * 5, (ONE, bytes(32))])
def test_malformed_keys_are_refused(keys: tuple[bytes, ...]) -> None:
    with pytest.raises(LocalProtocolError):
        Swarm("a", keys)
