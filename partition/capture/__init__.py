"""The requester's side: from any `nn.Module` to a graph that strangers can check, and its proof.

This package runs the model's own Python, so it belongs on the model owner's machine, and nothing that runs a
stranger's graph imports it.
"""

from partition.capture.capture import Captured, capture
from partition.capture.errors import CaptureRefused
from partition.capture.skeleton import skeleton
from partition.capture.task import Task, correct
from partition.capture.trees import own_loss

__all__ = ["CaptureRefused", "Captured", "Task", "capture", "correct", "own_loss", "skeleton"]
