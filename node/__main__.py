"""The entry of the console script `peerloom`, and of `node` run as a module: see `node.cli.main`."""

import sys


def main() -> int:
    """Do what the command line of `peerloom` says; the exit code."""
    from node.invocation import enter_by_script

    enter_by_script()
    return run()


def run() -> int:
    """Do what the command line says; the exit code."""
    from node.cli import main as command_line

    return command_line.run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run())
