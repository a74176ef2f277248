"""Tries several addresses of one peer. Attempts start one after the other and soon overlap; the first success
wins.

RFC 8305 ("happy eyeballs"), section 5: an attempt that has neither succeeded nor failed after a short delay
does not hold up the next one. So an address that swallows packets costs only a fraction of a second.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import trio

from crypto.contact import Address
from node.errors import NotListening, Unreachable

ATTEMPT_DELAY_SECONDS = 0.25
"""Delay between two attempts, as RFC 8305 recommends. After a failure the next attempt begins immediately."""
AT_ONCE_MAX = 4
"""Maximum number of attempts in flight without an extra delay. A further attempt begins when the oldest ends,
or has taken several times a usual round trip."""
CROWDED_DELAY_SECONDS = 1.0
"""Delay once AT_ONCE_MAX attempts are in flight, so that all addresses of a contact are tried within some
seconds."""
REASONS = ("work", "wrong key", "refused", "timeout", "unknown")
"""Reasons for failures, the most informative first."""

T = TypeVar("T")


async def race(
    addresses: Sequence[Address],
    attempt: Callable[[Address], Awaitable[T]],
    first_delay_seconds: float = ATTEMPT_DELAY_SECONDS,
) -> list[T]:
    """Return the result of the first successful attempt. If several succeeded at the same instant, return
    them all; the caller releases all but the first. The other attempts are cancelled. The second attempt
    begins `first_delay_seconds` after the first.

    Raises:
        Unreachable: all failed; carries the most informative failure.
    """
    won: list[T] = []
    failures: list[Unreachable] = []
    stirred = trio.Event()
    in_flight = 0

    async def run(address: Address) -> None:
        nonlocal in_flight, stirred
        in_flight += 1
        try:
            won.append(await attempt(address))
            nursery.cancel_scope.cancel()
        except Unreachable as failure:
            failures.append(failure)
        finally:
            in_flight -= 1
            stirred.set()

    async with trio.open_nursery() as nursery:
        for index, address in enumerate(addresses[:-1]):
            stirred = trio.Event()
            nursery.start_soon(run, address)
            delay_seconds = ATTEMPT_DELAY_SECONDS if in_flight < AT_ONCE_MAX - 1 else CROWDED_DELAY_SECONDS
            delay_seconds = delay_seconds if index else first_delay_seconds
            with trio.move_on_after(delay_seconds):
                await stirred.wait()
        if addresses:
            nursery.start_soon(run, addresses[-1])
    if won:
        return won
    if not failures:
        raise Unreachable("unknown", "there is no address to try")
    # An answer from one address outweighs failures at others, because it shows that a node listens there.
    raise min(
        failures, key=lambda failure: (REASONS.index(failure.reason), isinstance(failure, NotListening))
    )
