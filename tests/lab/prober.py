"""Plain sockets on a machine of a laboratory, controlled line by line. Nothing of the product is involved.

python -m tests.lab.prober answer requests in JSON, one a line python -m tests.lab.prober forget NAMESPACE...
let these namespaces forget every connection that they track

`tests.lab.nat.Prober` is the other end, in the test.
"""

import ctypes
import errno
import json
import select
import socket
import struct
import sys
from typing import Any

WAIT_SECONDS = 5.0
"""Seconds to wait for expected packets, even on a busy machine."""
_NETFILTER, _FLUSH, _REQUEST_ACK = 12, 1 << 8 | 2, 1 | 4


class _Sockets:
    """The sockets of one machine; each public method is a request."""

    def __init__(self) -> None:
        self._udp: dict[int, socket.socket] = {}
        self._listening: dict[int, socket.socket] = {}

    def open(self, port: int) -> None:
        """Open sockets of all families for datagrams and for listening, and close earlier ones."""
        for before in (*self._udp.values(), *self._listening.values()):
            before.close()
        self._udp = {port: socket.socket(*_family(), socket.SOCK_DGRAM)}
        self._listening = {port: socket.socket(*_family(), socket.SOCK_STREAM)}
        _bind(self._udp[port], port)
        _bind(self._listening[port], port)
        self._listening[port].listen()

    def send(self, port: int, to: list[Any], text: str = "hello") -> None:
        self._udp[port].sendto(text.encode(), _name(self._udp[port], to))

    def receive(self, port: int, seconds: float = WAIT_SECONDS) -> "list[Any] | None":
        """Return the source of the next datagram, and its text; None if none came."""
        readable, _, _ = select.select([self._udp[port]], [], [], seconds)
        if not readable:
            return None
        data, source = self._udp[port].recvfrom(2_000)
        return [*_plain(source), data.decode()]

    def accept(self, port: int, seconds: float = WAIT_SECONDS) -> "list[Any] | None":
        """Return the source of the next connection, and greet it; None if none came."""
        readable, _, _ = select.select([self._listening[port]], [], [], seconds)
        if not readable:
            return None
        made, source = self._listening[port].accept()
        made.sendall(b"welcome")
        made.close()
        return _plain(source)

    def connect(
        self, port: int, to: list[Any], seconds: float = WAIT_SECONDS, *, greets: bool = True
    ) -> bool:
        """Connect from this port, or accept a connection to it, whichever happens first. Return whether both
        sides have received the other's greeting; if this side does not `greet`, return whether they are
        connected."""
        made = socket.socket(*_family(), socket.SOCK_STREAM)
        _bind(made, port)
        made.setblocking(False)
        waiting = [made, *filter(None, [self._listening.get(port)])]
        try:
            if made.connect_ex(_name(made, to)) != errno.EINPROGRESS:
                return False
            readable, writable, _ = select.select(waiting[1:], waiting[:1], [], seconds)
            if readable:
                made.close()
                made, _ = readable[0].accept()
            elif not writable:
                return False
            if not greets:
                return made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
            made.setblocking(True)
            made.settimeout(seconds)
            made.sendall(b"welcome")
            return made.recv(100) == b"welcome"
        except OSError:
            return False
        finally:
            made.close()


def _family() -> tuple[int]:
    return (socket.AF_INET6 if _has_ipv6() else socket.AF_INET,)


def _has_ipv6() -> bool:
    with open("/proc/sys/net/ipv6/conf/all/disable_ipv6") as file:
        return file.read().strip() == "0"


def _bind(made: socket.socket, port: int) -> None:
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind(("::" if made.family == socket.AF_INET6 else "0.0.0.0", port))


def _name(made: socket.socket, to: list[Any]) -> tuple[str, int]:
    host, port = to
    return f"::ffff:{host}" if made.family == socket.AF_INET6 and ":" not in host else host, port


def _plain(source: Any) -> list[Any]:
    return [source[0].removeprefix("::ffff:"), source[1]]


def forget(namespace: str) -> None:
    """Send the request of conntrack-tools' `conntrack --flush`."""
    with open(f"/run/netns/{namespace}") as file:
        assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETFILTER) as netlink:
        netlink.send(struct.pack("=IHHIIBBH", 20, _FLUSH, _REQUEST_ACK, 1, 0, 0, 0, 0))
        (error,) = struct.unpack_from("=i", netlink.recv(4_096), 16)
        assert error == 0, error


def main() -> None:
    if sys.argv[1:2] == ["forget"]:
        for namespace in sys.argv[2:]:
            forget(namespace)
        return
    sockets = _Sockets()
    for line in sys.stdin:
        request = json.loads(line)
        found = getattr(sockets, request.pop("do"))(**request)
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
