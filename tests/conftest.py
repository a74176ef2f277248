"""Shared by all tests: coroutines run under trio; its order of tasks, and hypothesis, are deterministic."""

import gc
import inspect
import os
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import trio
from hypothesis import settings

from node.containment import strictness
from sim.worlds.scheduling import ordered

EXAMPLES = int(os.environ.get("PEERLOOM_EXAMPLES", "50"))
"""The examples of a property that sets no number itself."""
settings.register_profile("peerloom", derandomize=True, deadline=None, print_blob=True, max_examples=EXAMPLES)
settings.load_profile("peerloom")
# Nodes in processes of their own would each occupy a core for seconds during the test.
os.environ.setdefault("PEERLOOM_CALIBRATE", "false")
# Read when torch and numpy are loaded later. Their threads would spin while waiting for each other: with more
# workers than cores, tests of two threads took 20 times the CPU time of one.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


SECONDS_MAX = 60.0
"""The seconds for one test."""
ORDER = os.environ.get("PEERLOOM_ORDER", "1")
"""Another value changes the order of simultaneously ready tasks in every test."""


@pytest.fixture(autouse=True)
def _tasks_take_the_same_turns(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make a test in virtual time repeat the same in every run."""
    with ordered(Random(f"{ORDER} {request.node.nodeid}")):
        yield


@pytest.fixture(autouse=True)
def _bugs_come_out() -> Iterator[None]:
    """Contain no failures in a test, unless it asks for that by `strictness(is_strict=False)`."""
    with strictness(is_strict=True):
        yield


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker of slow tests."""
    config.addinivalue_line("markers", "slow(seconds=60): played by `make soak`, or with PEERLOOM_SLOW set")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip slow tests in a usual run: others cover most of their subject."""
    if "PEERLOOM_SLOW" not in os.environ:
        for item in items:
            if item.get_closest_marker("slow") is not None:
                item.add_marker(pytest.mark.skip(reason="slow: set PEERLOOM_SLOW"))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Exempt imported objects from garbage collection: they live as long as the process.

    There are some millions of them, mostly torch's; a test makes few.
    """
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run coroutine tests with trio; a test that never ends fails after a minute, or after the `seconds` of
    its marker `slow`."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    slow = pyfuncitem.get_closest_marker("slow")
    seconds = SECONDS_MAX if slow is None else slow.kwargs.get("seconds", SECONDS_MAX)

    async def main() -> Any:
        with trio.fail_after(seconds):
            await pyfuncitem.obj(**arguments)

    trio.run(main)
    return True
