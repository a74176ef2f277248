"""The negotiation of a suite: the initiator's offer, the responder's answer, and the prologue that binds
both.

    offer     version 1 | count 1 | that many suite numbers, best first
    answer    the number chosen 1; unless it is the first of the offer: count 1 | that many of the responder's

The responder chooses the first suite of the offer that it also accepts. The first suite of the offer is the
initiator's guess, and its Noise message is sent along with the offer, so a right guess costs no round trip.
After a wrong guess the initiator restarts.

`prologue` puts the offer and the answer, exactly as sent, before everything that Noise hashes. After a wrong
guess it also includes the wasted message. So changing one byte of them makes the handshake fail. After a
right guess the answer has no list, because the initiator already got the suite it prefers most. After a wrong
guess the initiator repeats the choice from both lists. The order of the flights is in `peer_handshake`.
"""

from collections.abc import Sequence

from crypto.errors import RemoteProtocolError
from crypto.noise.suites import SUITES, Suite

VERSION = 3
HEAD_BYTES = 2
"""Length of version and count, which determine the length of the offer."""
SUITES_MAX = 8
"""Maximum number of suites in one list: twice the number that exist, to leave room for later versions."""
NONE_TAKEN = 0

_DOMAIN = b"peerloom/noise/2\0"
_BY_NUMBER = {suite.number: suite for suite in SUITES}


def numbers_of(suites: Sequence[Suite]) -> bytes:
    return bytes(suite.number for suite in suites)


def offer_of(suites: Sequence[Suite]) -> bytes:
    """Return the first bytes that the initiator sends."""
    return bytes((VERSION, len(suites))) + numbers_of(suites)


def check_head(head: bytes) -> int:
    """Return the number of suites in an offer with this head. Raises RemoteProtocolError for an unknown
    version or an invalid count."""
    if head[0] != VERSION:
        raise RemoteProtocolError("a connection that does not begin with our handshake's version")
    return check_count(head[1])


def check_count(count: int) -> int:
    """Return the number of suites in a list. Raises RemoteProtocolError for zero or too many."""
    if not 1 <= count <= SUITES_MAX:
        raise RemoteProtocolError(f"a list of {count} suites")
    return count


def choose(offered: bytes, taken: bytes) -> Suite | None:
    """Return the first of the numbers `offered` that is also in `taken`; unknown numbers are skipped."""
    return next((_BY_NUMBER[number] for number in offered if number in taken and number in _BY_NUMBER), None)


def answer_of(suite: Suite | None, offered: bytes, suites: Sequence[Suite]) -> bytes:
    """Return the answer to an offer from which `suite` was chosen; `suites` are the responder's."""
    if suite is not None and suite.number == offered[0]:
        return bytes((suite.number,))
    chosen = NONE_TAKEN if suite is None else suite.number
    return bytes((chosen, len(suites))) + numbers_of(suites)


def names_of(numbers: bytes) -> str:
    """Return a list of suites as text for people."""
    return ", ".join(_BY_NUMBER[number].name if number in _BY_NUMBER else str(number) for number in numbers)


def prologue(swarm: str, offer: bytes, answer: bytes) -> bytes:
    """Return the bytes on which both sides must agree. The length of each part can be read from these
    bytes."""
    name = swarm.encode()
    return b"".join((_DOMAIN, len(name).to_bytes(4, "big"), name, offer, answer))
