"""`python -m partition.calibrate DEVICE DTYPE THREADS SECONDS`: measure classes of operators here; print them
as hex.

This is a separate process, because a node does not import torch.
"""

import sys
from collections.abc import Sequence

from partition.calibrate.timing import calibrate
from partition.execute import defer_compiler
from partition.plan.rates import encode_calibration


def main(arguments: Sequence[str]) -> None:
    """Print a calibration as hex."""
    device, dtype, threads, seconds = arguments
    defer_compiler()
    found = calibrate(device, dtype, int(threads), float(seconds))
    sys.stdout.write(encode_calibration(found).hex() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
