"""Nodes that serve tokens in the place of models, where a test asks for it."""

import pytest

from node.serving import hosting
from tests.node.serving.scene import TokensServed


@pytest.fixture
def tokens_served(monkeypatch: pytest.MonkeyPatch) -> type[TokensServed]:
    """The stages of this test's nodes, which it may make slow, large or broken."""
    kind = TokensServed.anew()
    monkeypatch.setattr(hosting, "HeldStage", kind)
    return kind
