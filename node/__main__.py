"""`python -m node`: see `node.cli.main`."""

import sys

from node.cli.main import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
