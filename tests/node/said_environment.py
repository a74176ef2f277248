"""Print the environment of this process, for tests that check what a child process receives."""

import os
import sys

sys.stdout.write(" ".join(f"{name}={value}" for name, value in os.environ.items()))
