"""The entry of `sim` run as a module: see `sim.cli`."""

import sys

from sim.cli import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
