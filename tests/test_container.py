"""The container files: files that they copy exist, programs that they start form a swarm, and the image is
small."""

import os
import re
import shutil
import subprocess
from typing import Any

import pytest
import typer.main

from node.config import Config, resolve
from node.main import app
from tests.source import ROOT

IMAGE_BYTES_MAX = 150_000_000
BUILD_SECONDS_MAX = 900.0
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def read(name: str) -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((ROOT / "deploy" / name).read_text(encoding="utf-8"))


def settings_of(command: list[str]) -> Config:
    """Return the settings of a node started with this command. Raises UsageError."""
    given = typer.main.get_command(app).make_context("peerloom", list(command)).params
    return resolve({name: value for name, value in given.items() if value not in (None, False, "")}, {})


def has_builder() -> bool:
    """Return whether a daemon that builds images answers."""
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "info"], check=False, capture_output=True, timeout=30).returncode == 0


def test_files_copied_into_an_image_exist_and_are_not_ignored() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    words = [word for line in copied for word in line.split()]
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert sorted(words) == sorted(line[1:] for line in ignored if line.startswith("!"))
    assert [word for word in words if not (ROOT / word).exists()] == []
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert packages <= set(words)


def test_composed_nodes_join_each_other_and_prometheus_scrapes_all() -> None:
    services = read("compose.yml")["services"]
    nodes = {name: settings_of(services[name]["command"]) for name in ("one", "two", "three")}
    listened = {each.listen.addresses[0].port for each in nodes.values()}
    pages = {each.web.address.port for each in nodes.values() if each.web.address is not None}
    assert (len(listened), len(pages)) == (3, 3)
    joined = {name: {seed.port for seed in each.join.seeds} for name, each in nodes.items()}
    assert joined == {"one": set(), "two": {9747}, "three": {9757}}
    assert {port for ports in joined.values() for port in ports} < listened
    (scraped,) = read("compose-prometheus.yml")["scrape_configs"]
    assert {int(each.rpartition(":")[2]) for each in scraped["static_configs"][0]["targets"]} == pages
    mounted = [each.partition(":")[0] for each in services["prometheus"]["volumes"]]
    assert [each for each in mounted if not (ROOT / "deploy" / each).exists()] == []


@pytest.mark.skipif("PEERLOOM_CONTAINER" not in os.environ, reason="builds an image: in make soak")
def test_the_image_without_torch_is_small_and_runs() -> None:
    if not has_builder():
        pytest.skip("no builder of images answers here")

    def docker(*words: str) -> str:
        command = ["docker", *words]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=BUILD_SECONDS_MAX
        ).stdout

    docker("build", "--quiet", "--tag", "peerloom-test", ".")
    assert int(docker("image", "inspect", "--format", "{{.Size}}", "peerloom-test")) <= IMAGE_BYTES_MAX
    assert docker("run", "--rm", "peerloom-test", "--version").startswith("peerloom ")
