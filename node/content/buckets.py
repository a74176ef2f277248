"""Files in buckets of object storage, `s3://BUCKET/FILE` and `gs://BUCKET/FILE`, read by fsspec.

Credentials, region and endpoint are found as each provider's own tools find them: in the environment
(`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, `GOOGLE_APPLICATION_CREDENTIALS`), then in its files. None is kept
or told to others: the command of the person who asks reads the file, and what travels are arrays.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import IO

from node.errors import UsageError
from node.invocation import install_command

PACKAGES: Mapping[str, str] = MappingProxyType({"s3": "s3fs", "gs": "gcsfs"})
"""By scheme: the package that reads it beside fsspec."""
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
        import fsspec  # only here: it is in no other command

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
    except Exception as error:  # each provider's package has errors of its own
        raise UsageError(f"{shown}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """What is wrong, in a line: some packages give only the path, or a page of XML."""
    if isinstance(error, FileNotFoundError):
        return "no such bucket or file"
    if isinstance(error, PermissionError):
        return "these credentials may not read it"
    text = str(error).strip()
    return (text.splitlines()[0] if text else type(error).__name__)[:_LENGTH_SHOWN]
