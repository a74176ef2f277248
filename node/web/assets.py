"""The files of the page, read once: scripts and styles of ours and of others, which are vendored with their
licences and checked by hash in the tests. Nothing is loaded from elsewhere, so the page works offline.
"""

from hashlib import sha256
from http import HTTPStatus
from pathlib import Path

from node.web.door import Response, problem

FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


class Assets:
    """Files by name. A name that is not among them is not looked for on the disk."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files: dict[str, tuple[bytes, str, str]] = {}
        for path in sorted(folder.rglob("*")):
            if path.suffix in _TYPES:
                data = path.read_bytes()
                if path.suffix == ".js" and path.parent == folder:
                    data = squeeze(data)
                tag = f'"{sha256(data).hexdigest()[:16]}"'
                self._files[path.relative_to(folder).as_posix()] = (data, _TYPES[path.suffix], tag)

    @property
    def script_bytes(self) -> int:
        """How long all scripts are together, as they are served."""
        return sum(len(data) for name, (data, _, _) in self._files.items() if name.endswith(".js"))

    def serve(self, name: str, known: str | None) -> Response:
        """A file; nothing but a word where the browser has it, by its tag, already."""
        found = self._files.get(name)
        if found is None:
            return problem(HTTPStatus.NOT_FOUND, "there is nothing here")
        data, content_type, tag = found
        headers = (("etag", tag), ("cache-control", "no-cache"))
        if known == tag:
            return Response(b"", HTTPStatus.NOT_MODIFIED, content_type, headers)
        return Response(data, HTTPStatus.OK, content_type, headers)


def squeeze(script: bytes) -> bytes:
    """One of our scripts without indentation and lines of comment, which a browser need not load."""
    lines = (line.strip() for line in script.split(b"\n"))
    return b"\n".join(line for line in lines if line and not line.startswith(b"//")) + b"\n"
