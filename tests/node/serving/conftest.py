"""Nodes that serve tokens instead of models, for tests that request them."""

import pytest

from tests.node.serving.scene import TokensServed


@pytest.fixture
def tokens_served() -> type[TokensServed]:
    """Return the stages of this test's nodes; a test may make them slow, large or broken."""
    return TokensServed.anew()
