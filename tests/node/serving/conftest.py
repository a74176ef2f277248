"""Nodes that serve tokens instead of models, for tests that request them."""

import pytest

from node.serving import hosting
from tests.node.serving.scene import TokensServed


@pytest.fixture
def tokens_served(monkeypatch: pytest.MonkeyPatch) -> type[TokensServed]:
    """The stages of this test's nodes; a test may make them slow, large or broken."""
    kind = TokensServed.anew()
    monkeypatch.setattr(hosting, "HeldStage", kind)
    return kind
