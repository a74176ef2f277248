"""The requester's side: from any `nn.Module` to a graph that other peers can check, and its proof.

This package runs the model's own Python code, so it belongs on the model owner's machine. Code that runs
graphs received from peers never imports it.
"""

from partition.capture.capture import Captured, capture
from partition.capture.errors import CaptureRefused
from partition.capture.skeleton import skeleton
from partition.capture.task import Task, correct
from partition.capture.trees import own_loss

__all__ = ["CaptureRefused", "Captured", "Task", "capture", "correct", "own_loss", "skeleton"]
