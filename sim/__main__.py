"""The entry point of the module `sim`; see `sim.cli`."""

import sys

from node.__main__ import Run, start


def _load() -> Run:
    from sim.cli import run

    return run


if __name__ == "__main__":
    sys.exit(start(_load))
