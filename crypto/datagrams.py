"""The signed datagram: one UDP packet that proves who sent it, to whom, in which swarm, and only once.

    version 1 | swarm tag 8 | sender 32 | receiver 32 | boot 8 | sequence 8 | name length 1 | name
    | payload | Ed25519 signature 64 over all before it, with the purpose and the swarm's full name

The swarm tag (of SHA-256 of the name) only sorts; the signature binds the name itself. It is not
encrypted, and it is the skeleton's: a signature costs 33 + 105 us where a session's MAC costs 1 to 2
so sessions as WireGuard's replace it later behind the same two classes.

Replays: per sender a sliding window as RFC 6479's, 1,024 wide, within one boot; boots may only grow
(a boot is unix milliseconds at start). Two limits of this, both said openly: a receiver that
restarted has an empty memory, and a sender that fell out of the bounded memory is met anew; in both
cases a packet caught earlier can be played once more. What rides on it is idempotent (SWIM, Kademlia).
"""

import hashlib
import struct
from collections import OrderedDict
from dataclasses import dataclass

from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.facts import signed_bytes
from crypto.identity import SIGNATURE_BYTES, Identity, PeerId, verify

DATAGRAM_BYTES_MAX = 1_232
"""IPv6's least MTU of 1,280 less the IPv6 and UDP headers: it is fragmented nowhere."""
PROTOCOL_BYTES_MAX = 64
WINDOW_BITS = 1_024
"""How far packets may overtake each other; RFC 6479 recommends a window of at least this order."""
SENDERS_MAX = 4_096
"""Replay windows kept, at 200 to 400 bytes each; a full SWIM scope has up to 600 members."""

_VERSION = 1
_PURPOSE = "datagram"
_HEADER = struct.Struct(">B8s32s32sQQB")
_WINDOW_MASK = (1 << WINDOW_BITS) - 1
_COUNTER_MAX = 2**64 - 1


class DatagramRefused(RemoteProtocolError):
    """`reason` is one word for a counter: malformed, swarm, receiver, replay or signature."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class Datagram:
    """An authentic datagram. `newest`: no later one of this sender came before it."""

    sender: PeerId
    protocol: str
    payload: bytes
    newest: bool


def payload_bytes_max(protocol: str) -> int:
    """How much one datagram of `protocol` can carry."""
    return DATAGRAM_BYTES_MAX - _HEADER.size - len(protocol_bytes(protocol)) - SIGNATURE_BYTES


def protocol_bytes(protocol: str) -> bytes:
    """A protocol name as it is sent: printable ASCII behind a slash, such as `/peerloom/swim/1`."""
    name = protocol.encode()
    if not _is_protocol(name):
        raise LocalProtocolError(f"'{protocol[:80]}' is not a protocol name")
    return name


def _is_protocol(name: bytes) -> bool:
    return (
        1 < len(name) <= PROTOCOL_BYTES_MAX and name[0] == 0x2F and all(0x20 < byte < 0x7F for byte in name)
    )


def _swarm_tag(swarm: str) -> bytes:
    return hashlib.sha256(swarm.encode()).digest()[:8]


class Seal:
    """Makes this node's datagrams. `boot` is unix milliseconds at start, above every earlier one's."""

    def __init__(self, identity: Identity, swarm: str, boot: int) -> None:
        if not 0 <= boot <= _COUNTER_MAX:
            raise LocalProtocolError(f"a boot id of {boot}")
        self._identity = identity
        self._swarm = swarm
        self._tag = _swarm_tag(swarm)
        self._boot = boot
        self._sequence = 0

    def seal(self, receiver: PeerId, protocol: str, payload: bytes) -> bytes:
        """One datagram; LocalProtocolError if `payload` is longer than `payload_bytes_max(protocol)`."""
        name = protocol_bytes(protocol)
        if len(payload) > payload_bytes_max(protocol):
            raise LocalProtocolError(f"{len(payload)} bytes do not fit a datagram of {protocol}")
        self._sequence += 1
        header = _HEADER.pack(
            _VERSION, self._tag, self._identity.peer, receiver, self._boot, self._sequence, len(name)
        )
        body = header + name + payload
        return body + self._identity.sign(signed_bytes(_PURPOSE, self._swarm, body))


@dataclass
class _Window:
    """What of one sender's current boot was seen. Bit i of `seen` is sequence `highest - i`."""

    boot: int
    highest: int
    seen: int

    def is_new(self, boot: int, sequence: int) -> bool:
        if boot != self.boot:
            return boot > self.boot
        age = self.highest - sequence
        return age < 0 or (age < WINDOW_BITS and not self.seen >> age & 1)

    def mark(self, boot: int, sequence: int) -> bool:
        """Remember one that `is_new`; whether it is the newest."""
        if boot > self.boot:
            self.boot, self.highest, self.seen = boot, sequence, 1
            return True
        age = self.highest - sequence
        if age >= 0:
            self.seen |= 1 << age
            return False
        self.seen = (self.seen << min(-age, WINDOW_BITS) | 1) & _WINDOW_MASK
        self.highest = sequence
        return True


class Opener:
    """Checks datagrams sent to `receiver`; remembers at most `senders_max` senders, the latest heard."""

    def __init__(self, receiver: PeerId, swarm: str, *, senders_max: int = SENDERS_MAX) -> None:
        self._receiver = receiver
        self._swarm = swarm
        self._tag = _swarm_tag(swarm)
        self._senders_max = senders_max
        self._windows: OrderedDict[PeerId, _Window] = OrderedDict()

    def open(self, data: bytes) -> Datagram:
        """The datagram in `data`, once; else DatagramRefused. Cheap checks come before the signature."""
        if not _HEADER.size + SIGNATURE_BYTES < len(data) <= DATAGRAM_BYTES_MAX:
            raise DatagramRefused("malformed", f"a datagram of {len(data)} bytes")
        version, tag, sender, receiver, boot, sequence, name_bytes = _HEADER.unpack_from(data)
        body, signature = data[:-SIGNATURE_BYTES], data[-SIGNATURE_BYTES:]
        name = body[_HEADER.size : _HEADER.size + name_bytes]
        if version != _VERSION or len(name) != name_bytes or not _is_protocol(name):
            raise DatagramRefused("malformed", "a datagram of another version or without a protocol name")
        if tag != self._tag:
            raise DatagramRefused("swarm", "a datagram of another swarm")
        if receiver != self._receiver:
            raise DatagramRefused("receiver", "a datagram for another peer")
        window = self._windows.get(sender)
        if window is not None and not window.is_new(boot, sequence):
            raise DatagramRefused("replay", "a datagram that came before, or is too old to tell")
        if not verify(PeerId(sender), signed_bytes(_PURPOSE, self._swarm, body), signature):
            raise DatagramRefused("signature", "a datagram with a wrong signature")
        newest = self._mark(PeerId(sender), boot, sequence)
        return Datagram(PeerId(sender), name.decode(), body[_HEADER.size + name_bytes :], newest)

    def _mark(self, sender: PeerId, boot: int, sequence: int) -> bool:
        """Only after the signature held: a forger must not be able to move anybody's window."""
        window = self._windows.get(sender)
        if window is None:
            self._windows[sender] = _Window(boot, sequence, 1)
            if len(self._windows) > self._senders_max:
                self._windows.popitem(last=False)
            return True
        self._windows.move_to_end(sender)
        return window.mark(boot, sequence)
