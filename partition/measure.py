"""`python -m partition.measure DEVICE`: measure the FLOP/s of a device with a short product; print them as
JSON.

This is a separate process, because a node does not import torch.
"""

import json
import sys
import time

import torch

SIDE = 2_048
SECONDS = 0.3


def flops_per_second(device: str) -> float:
    """Multiply square float32 matrices for a short time; return the FLOP/s. Raises RuntimeError: torch has no
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
    # On a device that computes asynchronously, reading one element waits for the product.
    (matrix @ matrix)[0, 0].item()


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"flops_per_second": flops_per_second(sys.argv[1])}) + "\n")
