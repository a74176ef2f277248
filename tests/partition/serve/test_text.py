"""Pieces of text: together they are the whole text, without split characters or stop sequences."""

from hypothesis import given
from hypothesis import strategies as st

from partition.serve.text import TextStream, decode_bytes


def pieces(text: str, *stops: str) -> tuple[list[str], bool]:
    stream = TextStream(decode_bytes, stops)
    found = [stream.push(byte) for byte in text.encode()]
    return [*found, stream.finish()], stream.is_stopped


@given(st.text())
def test_all_pieces_together_are_the_whole_text(text: str) -> None:
    found, _ = pieces(text)
    assert "".join(found) == text


@given(st.text(), st.text(min_size=1, max_size=4))
def test_a_text_ends_before_its_first_stop(text: str, stop: str) -> None:
    found, is_stopped = pieces(text, stop)
    assert "".join(found) == text.partition(stop)[0]
    assert is_stopped == (stop in text)


def test_no_piece_splits_a_character() -> None:
    found, _ = pieces("na\u00efve \u65e5\u672c \U0001f642")
    assert not any("\ufffd" in piece for piece in found)
    assert "\U0001f642" in found


def test_invalid_bytes_are_shown_as_replacement_characters() -> None:
    stream = TextStream(decode_bytes)
    assert "".join([stream.push(0xFF) for _ in range(6)] + [stream.finish()]) == "\ufffd" * 6


def test_text_that_may_begin_a_stop_sequence_is_held_back() -> None:
    found, _ = pieces("a\nUs b\nUser: c", "\nUser:")
    assert found[1:4] == ["", "", ""]
    assert "".join(found) == "a\nUs b"
