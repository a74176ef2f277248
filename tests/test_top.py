"""`top`: its lines depend only on the documents that it shows."""

from node import events
from node.cli.top import sparkline, top_lines
from node.state import State, apply
from node.state_documents import event_document, peers_document, status_document
from tests.node.web.world import STARTED, capacity, joined, peer, run_events, started

NOW = STARTED + 60


def screen(*, width: int = 100, height: int = 40, members: int = 4) -> list[str]:
    happened = [
        capacity(),
        started(),
        *(joined(number) for number in range(1, members + 1)),
        *run_events(),
        events.MemberSuspected(at=STARTED + 20, peer=peer(2), by=peer(3)),
        events.MemberLost(at=STARTED + 22, peer=peer(2), reason="no ack for 1.2 s"),
    ]
    state = State()
    for event in happened:
        state = apply(state, event)
    documents = [event_document(event) for event in happened]
    curves = {"ab" * 8: [2.3, 1.2, 0.8]}
    status = status_document(state, NOW, {})
    return top_lines(status, peers_document(state, NOW)["peers"], documents, curves, width, height)


def test_one_screen_shows_members_runs_and_events() -> None:
    text = "\n".join(screen())
    assert "here  ..." in text
    assert "swarm test: 3 alive, 1 dead" in text
    assert "step 3 of 3  loss 0.7667  256 samples/s  bubble 40%" in text
    assert "stage 1  layers 0-2  n1 n2  busy  80% ################" in text
    assert "dead: no ack for 1.2 s" in text
    assert "n2 lost (no ack for 1.2 s)" in text.splitlines()[-1]


def test_the_screen_fits_any_terminal() -> None:
    for width, height in [(20, 5), (80, 24), (200, 60)]:
        lines = screen(width=width, height=height, members=300)
        assert len(lines) < height
        assert max(map(len, lines)) <= width


def test_a_text_chart_keeps_the_first_and_last_value() -> None:
    assert sparkline([2.0, 1.0, 0.0], 10) == "@= "
    assert sparkline([1.0] * 50, 10) == " " * 10
    assert len(sparkline([float("nan"), 1.0, 2.0], 10)) == 2
