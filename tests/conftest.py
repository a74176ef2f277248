"""Settings for all tests. Coroutine tests run under trio, whose order of tasks is deterministic, as is
hypothesis."""

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
"""How many examples a property is tested with, if it does not set a number itself."""
settings.register_profile("peerloom", derandomize=True, deadline=None, print_blob=True, max_examples=EXAMPLES)
settings.load_profile("peerloom")
# Each node in a process of its own would occupy a core for seconds during the test.
os.environ.setdefault("PEERLOOM_CALIBRATE", "false")
# Read when torch and numpy are loaded later. Their threads would spin while waiting for each other: with more
# workers than cores, tests with two threads took 20 times the CPU time of one.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


SECONDS_MAX = 60.0
"""The time limit of one test."""
ORDER = os.environ.get("PEERLOOM_ORDER", "1")
"""The seed of trio's scheduler. A different value changes the order of simultaneously ready tasks in every
test."""


@pytest.fixture(autouse=True)
def _tasks_take_the_same_turns(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make a test in virtual time run identically each time."""
    with ordered(Random(f"{ORDER} {request.node.nodeid}")):
        yield


@pytest.fixture(autouse=True)
def _bugs_come_out() -> Iterator[None]:
    """Let every failure reach the test: nodes contain none, unless the test sets
    `strictness(is_strict=False)`."""
    with strictness(is_strict=True):
        yield


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker of slow tests."""
    config.addinivalue_line(
        "markers", ("slow(seconds=60): a test that runs only with `make soak` or PEERLOOM_SLOW")
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip slow tests by default: other tests cover most of their subject."""
    if "PEERLOOM_SLOW" not in os.environ:
        for item in items:
            if item.get_closest_marker("slow") is not None:
                item.add_marker(pytest.mark.skip(reason="slow: set PEERLOOM_SLOW"))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Exempt the objects of imported modules from garbage collection: they live as long as the process.

    There are some millions of them, mostly torch's; a test makes few.
    """
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run coroutine tests with trio. A test fails after a minute, or after the `seconds` of its marker
    `slow`."""
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
