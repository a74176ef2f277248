"""Token buckets: rate limits, for all sources together and for each source."""

import ipaddress
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

HOSTS_MAX = 4_096
"""Number of hosts whose prefix is cached. Computing a prefix costs as much as accepting a connection from the
kernel."""
_PREFIX_BYTES = 8
"""Length of the IPv6 prefix that a household is given; the household can choose the remaining bytes."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(slots=True)
class TokenBucket:
    """A token bucket: `rate` tokens per second, at most `burst`. It held `tokens` at the time `at`, in
    seconds."""

    rate: float
    burst: float
    tokens: float
    at: float

    def left(self, now: float) -> float:
        """Return the number of tokens."""
        return min(self.burst, self.tokens + max(0.0, now - self.at) * self.rate)

    def take(self, now: float) -> bool:
        """Take a token if there is one."""
        self.tokens = self.left(now)
        self.at = now
        if self.tokens < 1.0:
            return False
        self.tokens -= 1.0
        return True

    def give(self) -> None:
        """Put a token back."""
        self.tokens = min(self.burst, self.tokens + 1.0)


class Buckets(Generic[Key]):
    """A bucket for each source, full when it is new. The `sources_max` most recently used are kept."""

    def __init__(self, rate: float, burst: float, sources_max: int) -> None:
        self._rate = rate
        self._burst = burst
        self._sources_max = sources_max
        self._buckets: OrderedDict[Key, TokenBucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def of(self, source: Key, now: float) -> TokenBucket:
        """Return the bucket of this source."""
        bucket = self._buckets.get(source)
        if bucket is None:
            bucket = self._buckets[source] = TokenBucket(self._rate, self._burst, self._burst, now)
            if len(self._buckets) > self._sources_max:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(source)
        return bucket

    def left(self, source: Key, now: float) -> float:
        """Return the tokens left for a source, without creating a bucket for it."""
        bucket = self._buckets.get(source)
        return self._burst if bucket is None else bucket.left(now)


@lru_cache(maxsize=HOSTS_MAX)
def prefix_of(host: str) -> bytes:
    """Return the prefix that one owner of addresses cannot leave: an IPv4 address, or the first 64 bits of an
    IPv6 address. IPv4 within IPv6 counts as IPv4."""
    address = ipaddress.ip_address(host)
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        return address.packed[:_PREFIX_BYTES] if mapped is None else mapped.packed
    return address.packed
