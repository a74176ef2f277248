"""The built-in models: ordinary modules, captured like a user's own. This file has only their names."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from partition.capture.models.gpt import gpt
from partition.capture.models.resnet18 import resnet18
from partition.capture.models.simple_cnn import simple_cnn
from partition.capture.task import Task

BUILTIN: Mapping[str, Callable[..., Task]] = MappingProxyType(
    {"gpt": gpt, "resnet18": resnet18, "simple-cnn": simple_cnn}
)
"""Each factory is called with (sample_shape, classes) and its own options."""
