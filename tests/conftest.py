"""Shared by all tests: `async def` tests run under trio, and hypothesis is deterministic."""

import inspect
from typing import Any

import pytest
import trio
from hypothesis import settings

settings.register_profile("peerloom", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("peerloom")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run coroutine tests with trio; a test that never ends fails after a minute."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}

    async def main() -> Any:
        with trio.fail_after(60):
            await pyfuncitem.obj(**arguments)

    trio.run(main)
    return True
