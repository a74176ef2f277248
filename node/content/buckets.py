"""Files in object storage buckets, `s3://BUCKET/FILE` and `gs://BUCKET/FILE`, read by fsspec.

Credentials, region and endpoint are found as by each provider's own tools: in the environment
(`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, `GOOGLE_APPLICATION_CREDENTIALS`), then in its files. They are
neither stored nor sent: the requester's own command reads the file, and only arrays leave its process.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import IO

from node.errors import UsageError
from node.invocation import install_command

PACKAGES: Mapping[str, str] = MappingProxyType({"s3": "s3fs", "gs": "gcsfs"})
"""For each URL scheme, the package with which fsspec reads it."""
BUCKET_SCHEMES = tuple(f"{scheme}://" for scheme in PACKAGES)
_LENGTH_SHOWN = 200


@contextmanager
def open_bucket(url: str) -> Iterator[IO[bytes]]:
    """Open a file in a bucket for reading.

    Raises:
        UsageError: the package that reads it is not installed, or the file cannot be read.
    """
    shown, scheme = url[:_LENGTH_SHOWN], url.partition("://")[0]
    package = PACKAGES[scheme]
    try:
        import fsspec  # imported here because no other command needs it

        fsspec.get_filesystem_class(scheme)
    except ImportError:
        raise UsageError(
            f"{shown}: the package {package}, which reads {scheme}://, is not installed",
            install_command(package),
        ) from None
    try:
        with fsspec.open(url, "rb") as file:
            yield file
    except UsageError:
        raise
    except Exception as error:  # each provider's package has its own errors
        raise UsageError(f"{shown}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """Return the reason for an error in one line. Some packages give only the path, or a page of XML."""
    if isinstance(error, FileNotFoundError):
        return "no such bucket or file"
    if isinstance(error, PermissionError):
        return "these credentials do not permit reading it"
    text = str(error).strip()
    return (text.splitlines()[0] if text else type(error).__name__)[:_LENGTH_SHOWN]
