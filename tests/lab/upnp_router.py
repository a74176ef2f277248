"""A router that maps ports by UPnP: SSDP, a description and SOAP, written from the specifications. It shares
nothing with the product. It runs in-process for tests on loopback, or as a program on a router of
`tests.lab.nat`:

python -m tests.lab.upnp_router EXTERNAL-HOST
"""

import re
import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"
GROUP, SSDP_PORT = "239.255.255.250", 1_900
DESCRIPTION = """<?xml version="1.0"?>
<root xmlns="urn:schemas-upnp-org:device-1-0"><device>
<deviceType>urn:schemas-upnp-org:device:InternetGatewayDevice:1</deviceType>
<serviceList><service><serviceType>urn:schemas-upnp-org:service:Layer3Forwarding:1</serviceType>
<controlURL>/l3</controlURL></service></serviceList>
<deviceList><device><deviceList><device><serviceList><service>
<serviceType>{service}</serviceType><serviceId>urn:upnp-org:serviceId:WANIPConn1</serviceId>
<controlURL>{control}</controlURL></service></serviceList></device></deviceList></device></deviceList>
</device></root>"""


class UpnpRouter:
    """`granted` are the current mappings: (transport, outer port) to (host, inner port, seconds)."""

    def __init__(
        self, host: str, external: str, ssdp_port: int = 0, nft: Callable[..., None] | None = None
    ) -> None:
        self.external = external
        self.granted: dict[tuple[str, int], tuple[str, int, int]] = {}
        self.taken: set[tuple[str, int]] = set()
        self.calls: list[str] = []
        self.location = ""
        self.first_answers: tuple[bytes, ...] = ()
        self.control = "/ctl/IPConn"
        self.permanent_only = self.refuses = False
        self.description: bytes | None = None
        self.redirect = ""
        self._nft = nft
        router = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if router.redirect:
                    self.send_response(302)
                    self.send_header("Location", router.redirect)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                made = DESCRIPTION.format(service=SERVICE, control=router.control).encode()
                self._say(200, made if router.description is None else router.description)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                action = self.headers["SOAPAction"].strip('"').partition("#")[2]
                self._say(*router.answer(action, dict(re.findall(r"<(New\w+)>([^<]*)</", body))))

            def _say(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "text/xml")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                pass

        self._http = ThreadingHTTPServer((host, 0), Handler)
        self._http.daemon_threads = True
        self._ssdp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._ssdp.bind((host, ssdp_port) if host.startswith("127.") else ("", ssdp_port))
        if not host.startswith("127."):
            joined = socket.inet_aton(GROUP) + socket.inet_aton(host)
            self._ssdp.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, joined)
        self.ssdp_port: int = self._ssdp.getsockname()[1]
        self.http_port: int = self._http.server_address[1]
        self.location = f"http://{host}:{self.http_port}/rootDesc.xml"
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._search, self._serve)]

    def __enter__(self) -> "UpnpRouter":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._ssdp.close()

    def _serve(self) -> None:
        self._http.serve_forever(poll_interval=0.02)

    def _search(self) -> None:
        while True:
            try:
                data, source = self._ssdp.recvfrom(2_048)
            except OSError:
                return
            if data.startswith(b"M-SEARCH"):
                for answer in self.first_answers:
                    self._ssdp.sendto(answer, source)
                if not self.location:
                    continue
                lines = ("HTTP/1.1 200 OK", f"LOCATION: {self.location}", "EXT:", "ST: upnp:rootdevice")
                self._ssdp.sendto("\r\n".join((*lines, "", "")).encode(), source)

    def answer(self, action: str, values: dict[str, str]) -> tuple[int, bytes]:
        self.calls.append(action)
        if self.refuses:
            return self._fault(606)
        if action == "GetExternalIPAddress":
            return self._ok(action, f"<NewExternalIPAddress>{self.external}</NewExternalIPAddress>")
        key = values["NewProtocol"].lower(), int(values["NewExternalPort"])
        if action == "DeletePortMapping":
            if self.granted.pop(key, None) is None:
                return self._fault(714)
            self._rule("delete", key)
            return self._ok(action)
        seconds = int(values["NewLeaseDuration"])
        if self.permanent_only and seconds:
            return self._fault(725)
        if key in self.taken:
            return self._fault(718)
        to = values["NewInternalClient"], int(values["NewInternalPort"])
        if key not in self.granted:
            self._rule("add", key, f": {to[0]} . {to[1]}")
        self.granted[key] = (*to, seconds)
        return self._ok(action)

    def _rule(self, what: str, key: tuple[str, int], to: str = "") -> None:
        if self._nft is not None:
            self._nft(what, *key, to)

    def _ok(self, action: str, inner: str = "") -> tuple[int, bytes]:
        body = f'<u:{action}Response xmlns:u="{SERVICE}">{inner}</u:{action}Response>'
        return 200, self._envelope(body)

    def _fault(self, code: int) -> tuple[int, bytes]:
        detail = (
            f'<UPnPError xmlns="urn:schemas-upnp-org:control-1-0"><errorCode>{code}</errorCode></UPnPError>'
        )
        return 500, self._envelope(
            f"<s:Fault><faultstring>UPnPError</faultstring><detail>{detail}</detail></s:Fault>"
        )

    def _envelope(self, body: str) -> bytes:
        head = '<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"><s:Body>'
        return f"{head}{body}</s:Body></s:Envelope>".encode()


def main() -> None:
    from tests.lab.router import nft

    with UpnpRouter("192.168.1.1", sys.argv[1], SSDP_PORT, nft):
        threading.Event().wait()


if __name__ == "__main__":
    main()
