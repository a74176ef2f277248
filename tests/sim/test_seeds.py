"""Sources of randomness in the simulation: figures drawn by seed and name, and seeded entropy. Also the
simulated signer."""

import pytest

from crypto.errors import RemoteProtocolError
from crypto.facts import Fact
from sim.seeds import HashSigner, draw, seeded_entropy, seeded_peer, seeded_rng


def test_a_draw_depends_on_seed_and_labels_only() -> None:
    assert draw(1, "a", 2) == draw(1, "a", 2)
    different = [draw(1, "a", 2), draw(2, "a", 2), draw(1, "a", 3), draw(1, "a2"), draw(1, b"a", 2), draw(-1)]
    assert len(set(different)) == len(different)


def test_two_peers_choose_differently_and_one_peer_repeats() -> None:
    one, other = seeded_peer(1, 0), seeded_peer(1, 1)
    assert one != other
    assert seeded_rng(1, one).random() == seeded_rng(1, one).random()
    assert seeded_rng(1, one).random() != seeded_rng(1, other).random()


def test_entropy_is_one_stream_however_it_is_read() -> None:
    whole, cut = seeded_entropy(1, "x"), seeded_entropy(1, "x")
    assert whole(200) == cut(1) + cut(99) + cut(0) + cut(100)
    assert whole(32) != whole(32)


def test_a_signed_fact_is_checked_by_any_signer_of_the_swarm() -> None:
    one, other = (HashSigner(seeded_peer(1, index), "home", 1) for index in range(2))
    fact = one.sign("contact", b"body")
    assert other.check("contact", fact) == one.peer


@pytest.mark.parametrize("change", ["purpose", "body", "author", "short", "swarm"])
def test_a_changed_fact_is_refused(change: str) -> None:
    signer = HashSigner(seeded_peer(1, 0), "home", 1)
    fact = signer.sign("contact", b"body")
    purpose = "alive" if change == "purpose" else "contact"
    body = b"ybod" if change == "body" else fact.body
    author = {"author": seeded_peer(1, 1), "short": b"x"}.get(change, fact.author)
    reader = HashSigner(seeded_peer(1, 2), "other" if change == "swarm" else "home", 1)
    with pytest.raises(RemoteProtocolError):
        reader.check(purpose, Fact(author, body, fact.signature))
