"""`python -m partition.measure DEVICE`: FLOP/s of a device by a short product, printed as JSON.

A process of its own, because a node does not import torch.
"""

import json
import sys
import time

import torch

SIDE = 2_048
SECONDS = 0.3


def flops_per_second(device: str) -> float:
    """Multiply square float32 matrices for a moment; return the FLOP/s. Raises RuntimeError: torch has no
    such device."""
    matrix = torch.ones((SIDE, SIDE), device=device)
    _multiply(matrix)
    products = 0
    begun = time.perf_counter()
    while (seconds := time.perf_counter() - begun) < SECONDS:
        _multiply(matrix)
        products += 1
    return products * 2.0 * SIDE**3 / seconds


def _multiply(matrix: torch.Tensor) -> None:
    # Reading one element back waits for the product on a device that works ahead.
    (matrix @ matrix)[0, 0].item()


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"flops_per_second": flops_per_second(sys.argv[1])}) + "\n")
