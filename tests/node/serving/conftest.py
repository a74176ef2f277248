"""Nodes that serve a function of tokens instead of models, for tests that request them."""

import pytest

from tests.node.serving.scene import TokensServed


@pytest.fixture
def tokens_served() -> type[TokensServed]:
    """Return the stage class of this test's nodes; a test may make its stages slow, large or broken."""
    return TokensServed.anew()
