"""Finds a foreign file that Python imports in place of one of our modules, or of a module that we need.

Python searches the program's folder (with `-m`, the current folder) before the installed packages. A
`crypto.py` or `queue.py` there is imported instead of the right module, and causes an error later. `import
node` runs this module first, so it uses only the standard library.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from types import ModuleType, TracebackType

PACKAGES = ("crypto", "dht", "gossip", "partition", "node", "sim")
"""Packages that our distribution installs at the top level."""
NEEDED = PACKAGES[:-1]
"""A program may have its own `sim`, since only the simulator's command needs ours."""
EXIT_SHADOWED = 2
"""The same exit code as for a wrong flag, because the user has to fix something."""
_INIT = "__init__.py"
_ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


def is_module_run() -> bool:
    """Return whether `python -m` is still importing the package that it will run."""
    return sys.argv[:1] == ["-m"]


def leave_current_folder() -> None:
    """Remove the current folder of `python -m` from the path, unless the packages themselves are in it.

    The user's files there are not part of the command. Without them the command behaves like `peerloom`.
    """
    if is_module_run() and not sys.flags.safe_path and sys.path:
        folder = _real(sys.path[0])
        if folder == _real("") and folder != _ROOT:
            del sys.path[0]


def shadow_of_ours(names: Sequence[str]) -> tuple[str, str] | None:
    """Return the name of one of our packages and the file that is imported in its place; None if there is
    none."""
    for name in names:
        found = _place_of(name)
        if found is not None and os.path.realpath(found) != os.path.join(_ROOT, name, _INIT):
            return name, _short(os.path.dirname(found) if os.path.basename(found) == _INIT else found)
    return None


def shadow_behind(error: BaseException) -> tuple[str, str] | None:
    """Return the module that caused `error` and the file in the program's folder that hides it; None if there
    is none."""
    folders = {_real(each) for each in ("", *sys.path[:1])}
    for file in _files_behind(error):
        folder, name = _module_at(file)
        if _real(folder) in folders and _is_elsewhere(name, folder):
            return name, _short(os.path.join(folder, os.path.basename(file)))
    return None


def shadow_text(name: str, place: str) -> str:
    """Return a text that names the file and the module that it hides."""
    whose = "the package" if name in PACKAGES else "the module"
    return f"{place} hides {whose} {name}, which peerloom needs"


def check_packages() -> None:
    """Check that our packages are imported, and not other files with their names.

    Raises ImportError, or in a command SystemExit after two lines on stderr.
    """
    leave_current_folder()
    found = shadow_of_ours(NEEDED)
    if found is None:
        return
    what = shadow_text(*found)
    if not (is_module_run() or os.path.basename(sys.argv[0] if sys.argv else "") == "peerloom"):
        raise ImportError(f"{what}: rename it", name=found[0], path=found[1])
    show_shadow(what)
    raise SystemExit(EXIT_SHADOWED)


def show_shadow(what: str) -> None:
    """Report a shadowing file on stderr, with a remedy."""
    sys.stderr.write(f"error: {what}\n  do: {remedy()}\n")


def remedy() -> str:
    """Return the remedy for a file that hides a module."""
    if os.environ.get("PYTHONPATH"):
        return "rename it, or remove its folder from PYTHONPATH"
    return "rename it, or use the command peerloom, which imports nothing from the current folder"


def _place_of(name: str) -> str | None:
    """Return the file that is imported under a name, or the folder if it has none."""
    try:
        spec = find_spec(name)
    except ValueError:  # imported by a program that set no spec
        return getattr(sys.modules[name], "__file__", None)
    if spec is None:
        return None
    return spec.origin or next(iter(spec.submodule_search_locations or ()), None)


def _files_behind(error: BaseException) -> Iterator[str]:
    """Yield the files that an error and its causes name, and the files in their tracebacks."""
    while True:
        yield from _files_named(error)
        trace: TracebackType | None = error.__traceback__
        while trace is not None:
            yield trace.tb_frame.f_code.co_filename
            trace = trace.tb_next
        following = error.__cause__ or error.__context__
        if following is None:
            break
        error = following


def _files_named(error: BaseException) -> Iterator[str]:
    """Yield the files of the modules that an import error or an attribute error names."""
    if isinstance(error, ImportError) and error.path:
        yield error.path
    if isinstance(error, SyntaxError) and error.filename:
        yield error.filename
    named = error.obj if isinstance(error, AttributeError) else None
    if isinstance(error, ModuleNotFoundError) and error.name:
        named = sys.modules.get(error.name.partition(".")[0])
    if isinstance(named, ModuleType) and getattr(named, "__file__", None):
        yield str(named.__file__)


def _module_at(file: str) -> tuple[str, str]:
    """Return the folder in which a module was found, and the module's name."""
    folder, base = os.path.split(file)
    name = base.partition(".")[0]
    return os.path.split(folder) if base == _INIT else (folder, name)


def _is_elsewhere(name: str, folder: str) -> bool:
    """Return whether a module of this name would be found without `folder`."""
    if name in sys.stdlib_module_names:
        return True
    others = [path for path in sys.path if _real(path) != _real(folder)]
    return name not in PACKAGES and PathFinder.find_spec(name, others) is not None


def _real(folder: str) -> str:
    """Return a folder of sys.path with links resolved; the current folder may have been removed."""
    try:
        return os.path.realpath(folder or os.curdir)
    except OSError:
        return folder


def _short(path: str) -> str:
    """Return the shortest form of a path that can be typed in the current folder."""
    try:
        return min(os.path.abspath(path), os.path.relpath(path), key=len)
    except OSError:
        return path
