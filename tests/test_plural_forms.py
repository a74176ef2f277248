"""No screen writes a single item in the plural."""

import re
from typing import Any

from node.cli.peers import peers_lines
from node.cli.screen import EventScreen
from node.cli.status import contribution_text, reachable_text, status_lines, table_text
from node.doctor.command import conclusion
from node.state_documents import event_document, peers_document, status_document
from tests.test_screens import HISTORY, NOW, state

ONE_OF_MANY = re.compile(
    r"(?<![\w.,:/#-])1 (?!ms\b)(?:other |further )?(?!costs\b|has\b|is\b|was\b)[a-z-]+(?<!s)s\b"
)
"""Matches `1 steps`, but not `1 loss`."""
TABLE_COUNTS = ("contacts", "nodes_estimated", "records", "own_records", "records_short")
CONTRIBUTION_COUNTS = (
    *("earned_flops", "earned_bytes", "earned_receipts"),
    *("issued_flops", "issued_bytes", "issued_receipts"),
)


def of_ones(value: Any) -> Any:
    """Return a document with each whole number in it replaced by 1."""
    match value:
        case dict():
            return {key: of_ones(each) for key, each in value.items()}
        case list() | tuple():
            return [of_ones(each) for each in value]
        case int() if not isinstance(value, bool):
            return 1
        case _:
            return value


def test_no_screen_writes_one_item_in_the_plural() -> None:
    screen = EventScreen(seeds=1)
    lines = [line for event in HISTORY for line in screen.lines(of_ones(event_document(event)))]
    lines += status_lines(of_ones(status_document(state(), NOW, {"malformed": 100})))
    lines += peers_lines(of_ones(peers_document(state(), NOW)))
    lines += [conclusion(1, failed, True) for failed in (0, 1)]
    lines.append(table_text(dict.fromkeys(TABLE_COUNTS, 1)))
    lines.append(contribution_text(dict.fromkeys(CONTRIBUTION_COUNTS, 1)))
    lines.append(reachable_text({"reachable": None, "asked": 1, "of": 1}))
    assert len(lines) > 80
    assert [line for line in lines if ONE_OF_MANY.search(line)] == []
    assert ONE_OF_MANY.search("  dht         1 contacts of about 2 nodes")
