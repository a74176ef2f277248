"""The negotiation of a suite: the initiator's offer, the responder's answer, and the prologue that binds
both.

    offer     version 1 | count 1 | that many suite numbers, best first
    answer    the number chosen 1; unless it is the first of the offer: count 1 | that many of the responder's

The responder chooses the first suite of the offer that it accepts too. The first suite is the initiator's
guess, and its Noise message comes with the offer, so a right guess costs no round trip. After a wrong guess
the initiator restarts.

`prologue` puts both, as they were sent, before everything that Noise hashes, and after a wrong guess also the
wasted message: changing a byte of them makes the handshake fail. After a right guess the answer holds no
list: the initiator prefers no other suite. After a wrong one the initiator repeats the choice from both
lists. The order of the flights is in `peer_handshake`.
"""

from collections.abc import Sequence

from crypto.errors import RemoteProtocolError
from crypto.noise.suites import SUITES, Suite

VERSION = 3
HEAD_BYTES = 2
"""Version and count, which give the length of an offer."""
SUITES_MAX = 8
"""Suites in one list: twice the existing number, for later versions."""
NONE_TAKEN = 0

_DOMAIN = b"peerloom/noise/2\0"
_BY_NUMBER = {suite.number: suite for suite in SUITES}


def numbers_of(suites: Sequence[Suite]) -> bytes:
    return bytes(suite.number for suite in suites)


def offer_of(suites: Sequence[Suite]) -> bytes:
    """Return the initiator's first bytes."""
    return bytes((VERSION, len(suites))) + numbers_of(suites)


def check_head(head: bytes) -> int:
    """Return the count of suites in an offer with this head; RemoteProtocolError if it is not one of ours."""
    if head[0] != VERSION:
        raise RemoteProtocolError("a connection that does not begin as ours do")
    return check_count(head[1])


def check_count(count: int) -> int:
    """Return the count of suites in a list; RemoteProtocolError for too many or none."""
    if not 1 <= count <= SUITES_MAX:
        raise RemoteProtocolError(f"a list of {count} suites")
    return count


def choose(offered: bytes, taken: bytes) -> Suite | None:
    """Return the first of the numbers `offered` that is also `taken`; unknown ones are skipped."""
    return next((_BY_NUMBER[number] for number in offered if number in taken and number in _BY_NUMBER), None)


def answer_of(suite: Suite | None, offered: bytes, suites: Sequence[Suite]) -> bytes:
    """Return the answer to an offer from which `suite` was chosen; `suites` are the responder's."""
    if suite is not None and suite.number == offered[0]:
        return bytes((suite.number,))
    chosen = NONE_TAKEN if suite is None else suite.number
    return bytes((chosen, len(suites))) + numbers_of(suites)


def names_of(numbers: bytes) -> str:
    """Return a list of suites as text for a person."""
    return ", ".join(_BY_NUMBER[number].name if number in _BY_NUMBER else str(number) for number in numbers)


def prologue(swarm: str, offer: bytes, answer: bytes) -> bytes:
    """Return the bytes that both sides must agree on; each part carries its length."""
    name = swarm.encode()
    return b"".join((_DOMAIN, len(name).to_bytes(4, "big"), name, offer, answer))
