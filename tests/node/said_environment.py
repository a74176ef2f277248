"""Writes the environment that a process has: for tests of what a child is given."""

import os
import sys

sys.stdout.write(" ".join(f"{name}={value}" for name, value in os.environ.items()))
