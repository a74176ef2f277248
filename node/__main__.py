"""Entry point of the console script `peerloom` and of the module `node`; see `node.main`."""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import node
from node import shadowing

Run = Callable[[Sequence[str]], int]


def main() -> int:
    """Run the command line of `peerloom`; return the exit code."""
    from node.invocation import enter_by_script

    enter_by_script()
    return start(_load)


def start(load: Callable[[], Run]) -> int:
    """Check the system, then get the command line from `load` and run it; return the exit code."""
    try:
        from node.cli.render import show_error
        from node.errors import UsageError

        try:
            node.check_system()
        except UsageError as error:
            show_error(error)
            return error.exit_code
        run = load()
    except (Exception, SystemExit) as error:  # a module shadowed by a user's file may exit at import
        if "--debug" in sys.argv or not _explain(error):
            raise
        return shadowing.EXIT_SHADOWED
    return run(sys.argv[1:])


def _load() -> Run:
    from node.main import run

    return run


def _explain(error: BaseException) -> bool:
    """Print why the command line cannot be imported; return False if the reason is not known."""
    found = shadowing.shadow_behind(error)
    if found is not None:
        shadowing.show_shadow(shadowing.shadow_text(*found))
    elif isinstance(error, ModuleNotFoundError) and error.name:
        missing = error.name.partition(".")[0]
        if missing in (*shadowing.PACKAGES, *sys.stdlib_module_names):
            return False
        sys.stderr.write(
            f"error: {sys.executable} has no module {missing}, which peerloom needs\n  do: {_remedy()}\n"
        )
    return found is not None or isinstance(error, ModuleNotFoundError)


def _remedy() -> str:
    """Return what the user should do: use the installed command, or install it."""
    script = Path(__file__).parents[1] / ".venv" / "bin" / "peerloom"
    if script.is_file():
        path = shlex.quote(min(str(script), os.path.relpath(script), key=len))
        return f"use {path}, which has what it needs"
    return "make demo in the clone, or install peerloom for this Python (README.md)"


if __name__ == "__main__":
    sys.exit(start(_load))
