"""Data in a bucket, read with the provider's package from a real S3 server on this machine (`pip install
peerloom[oracle]`). Without that package an error says how to install it.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.errors import UsageError
from node.main import run
from tests.source import ROOT

TABLE = b"width,height,label\n" + b"0.5,0.25,1\n0.1,0.2,0\n" * 10


def test_a_missing_package_for_a_bucket_is_reported_with_its_installation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fsspec")
    for url, package in (("s3://sets/table.csv", "s3fs"), ("gs://sets/table.csv", "gcsfs")):
        monkeypatch.setitem(sys.modules, package, None)  # as Python does for the import of a missing module
        assert run(["data", "show", url]) == UsageError.exit_code
        said = capsys.readouterr().err
        assert f"{url}: the package {package}, which reads {url[:5]}, is not installed" in said
        assert package in said.splitlines()[1]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://host/table.csv", "ftp:// is not read; what is: http://, https://, s3://, gs://"),
        ("s3://sets/folder", "want a file that ends in"),
    ],
)
def test_an_unknown_url_scheme_is_refused_with_the_known_ones(
    url: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["data", "show", url]) == UsageError.exit_code
    assert said in capsys.readouterr().err


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Start an S3 server whose bucket `sets` has a table, and yield the environment for commands that read
    from it."""
    moto = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    pytest.importorskip("s3fs")
    server = moto.ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        known = {
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        }
        client = boto3.client(
            "s3",
            endpoint_url=known["AWS_ENDPOINT_URL"],
            region_name="us-east-1",
            aws_access_key_id="id",
            aws_secret_access_key="secret",
        )
        client.create_bucket(Bucket="sets")
        client.put_object(Bucket="sets", Key="tables/table.csv", Body=TABLE)
        yield {**os.environ, **known, "PEERLOOM_DATA_DIR": str(tmp_path)}
    finally:
        server.stop()


def test_a_table_in_a_bucket_is_read_from_a_real_server(bucket: dict[str, str]) -> None:
    def show(url: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "node", "data", "show", url]
        return subprocess.run(command, capture_output=True, text=True, env=bucket, cwd=ROOT, check=False)

    found = show("s3://sets/tables/table.csv")
    assert found.returncode == 0, found.stderr
    assert "s3://sets/tables/table.csv" in found.stdout + found.stderr
    assert "label" in found.stdout + found.stderr
    for url in ("s3://sets/tables/none.csv", "s3://none/table.csv"):
        missing = show(url)
        assert missing.returncode == UsageError.exit_code
        assert f"{url}: no such bucket or file" in missing.stderr, missing.stderr
        assert "Traceback" not in missing.stderr
