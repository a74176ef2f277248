"""Answers requests for port mappings like a home router, with real nftables rules: NAT-PMP or PCP.

python -m tests.lab.router (nat-pmp|pcp|refusing) EXTERNAL-HOST

The program runs on a router of `tests.lab.nat`, and fills the router's map `forwarded`. If a requested port
is taken, it grants the next one. Its answers are written from the RFCs, and share no code with the product.
"""

import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable

ROUTER_PORT = 5_351
Forward = Callable[[str, str, int, str], object]
"""Changes the map of forwarded ports: the change, the transport, the port, and its destination."""

TRANSPORTS = {1: "udp", 2: "tcp", 17: "udp", 6: "tcp"}


class Router:
    """One router; `forward` changes its map of forwarded ports, as `nft` does."""

    def __init__(self, protocol: str, external: str, forward: Forward | None = None) -> None:
        self.protocol = protocol
        self.forward = forward or nft
        self.external = external
        self.began = time.monotonic()
        self.granted: dict[tuple[str, str, int], int] = {}

    @property
    def epoch(self) -> int:
        return int(time.monotonic() - self.began)

    def answer(self, data: bytes, host: str) -> bytes:
        if self.protocol == "pcp":
            return (
                self.pcp(data, host)
                if data[0] == 2
                else struct.pack(">BBHI", 0, data[1] | 128, 1, self.epoch)
            )
        if data[0] != 0:
            return struct.pack(">BBHI", 0, 128, 1, self.epoch)
        return self.nat_pmp(data, host)

    def nat_pmp(self, data: bytes, host: str) -> bytes:
        if data[1] == 0:
            return struct.pack(">BBHI", 0, 128, 0, self.epoch) + socket.inet_aton(self.external)
        inner, wanted, seconds = struct.unpack(">HHI", data[4:12])
        if self.protocol == "refusing":
            return struct.pack(">BBHIHHI", 0, data[1] | 128, 2, self.epoch, inner, 0, 0)
        port = self.grant(TRANSPORTS[data[1]], host, inner, wanted, seconds)
        return struct.pack(">BBHIHHI", 0, data[1] | 128, 0, self.epoch, inner, port, seconds)

    def pcp(self, data: bytes, host: str) -> bytes:
        _, opcode, _, seconds, client = struct.unpack(">BBHI16s", data[:24])
        nonce, transport, inner, wanted = struct.unpack(">12sB3xHH", data[24:44])
        result = 0 if client[12:] == socket.inet_aton(host) else 12
        port = self.grant(TRANSPORTS[transport], host, inner, wanted, seconds) if result == 0 else 0
        header = struct.pack(">BBBBII12x", 2, opcode | 128, 0, result, seconds, self.epoch)
        there = bytes(10) + b"\xff\xff" + socket.inet_aton(self.external)
        return header + struct.pack(">12sB3xHH", nonce, transport, inner, port) + there

    def grant(self, transport: str, host: str, inner: int, wanted: int, seconds: int) -> int:
        """Map a port or renew a mapping; with zero seconds, remove the mapping."""
        own = transport, host, inner
        before = self.granted.pop(own, None)
        if before is not None:
            self.forward("delete", transport, before, "")
        if seconds == 0:
            return 0
        taken = {port for (kind, _, _), port in self.granted.items() if kind == transport}
        port = before or wanted
        while port in taken:
            port += 1
        self.granted[own] = port
        self.forward("add", transport, port, f": {host} . {inner}")
        return port


def nft(what: str, transport: str, port: int, to: str = "") -> None:
    element = f"{{ {transport} . {port} {to} }}"
    subprocess.run(["nft", what, "element", "ip", "nat", "forwarded", element], check=True)


def main() -> None:
    protocol, external = sys.argv[1:]
    router = Router(protocol, external)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as answering:
        answering.bind(("0.0.0.0", ROUTER_PORT))
        while True:
            data, source = answering.recvfrom(1_100)
            answering.sendto(router.answer(data, source[0]), source)


if __name__ == "__main__":
    main()
