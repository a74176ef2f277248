"""Nodes that serve tokens in the place of models, where a test asks for it."""

import pytest

from node.serving import hosting
from tests.node.serving.scene import TokensServed


@pytest.fixture
def _tokens_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting, "HeldStage", TokensServed)
    monkeypatch.setattr(TokensServed, "opened", [])
    monkeypatch.setattr(TokensServed, "broken", set())
