"""The secrets of swarms differ by name and by key, and keep the order of the keys."""

import pytest

from crypto.errors import LocalProtocolError
from crypto.swarm import Swarm

ONE, OTHER = b"1" * 32, b"2" * 32


def test_swarms_have_separate_secrets() -> None:
    swarms = [Swarm("a"), Swarm("b"), Swarm("a", (ONE,)), Swarm("b", (ONE,)), Swarm("a", (OTHER,))]
    assert len({swarm.secrets for swarm in swarms}) == len(swarms)
    assert [swarm.is_private for swarm in swarms] == [False, False, True, True, True]


def test_a_key_has_the_same_secrets_before_and_during_a_rotation() -> None:
    both = Swarm("a", (ONE, OTHER))
    assert both.secrets == Swarm("a", (ONE,)).secrets + Swarm("a", (OTHER,)).secrets


@pytest.mark.parametrize("keys", [(b"short",), (ONE,) * 5, (ONE, bytes(32))])
def test_malformed_keys_are_refused(keys: tuple[bytes, ...]) -> None:
    with pytest.raises(LocalProtocolError):
        Swarm("a", keys)
