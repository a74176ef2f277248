"""The Python state of a module: restored after a trace or a proof, and compared before and after.

A graph keeps what `forward` computed once. A counter, a list that grows, a flag or a random number of Python
would be a constant in it, so everything that `forward` changes must be known. `restored` restores everything
in any case: attributes and the containers in them (including hooks), `requires_grad`, training flags, and the
states of Python's, numpy's and torch's global generators. Values of tensors are not copied here: a trace
computes none, and a proof copies the buffers.
"""

import random
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

OBJECTS_MAX = 1_000_000
"""Maximum number of a model's objects that are compared and restored; further objects are ignored."""
_DEPTH_MAX = 6
"""Maximum nesting depth of containers and objects, counted from the module."""
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.Size)
_OPAQUE = (Tensor, type, np.ndarray, torch.device, torch._C.Generator)
_SEPARATE = {"_buffers", "_parameters", "_modules"}
"""The attributes of a module whose tensors the trace itself handles."""


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restore the model and the global generators at the end of the context."""
    kept = [(each, _content(each)) for _, each in _held(model)]
    tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in model.modules():
        tables += [(table, dict(table)) for table in (module._parameters, module._buffers)]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    generators = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    try:
        yield
    finally:
        for each, content in kept:
            _put(each, content)
        for table, content in tables:
            table.clear()
            table.update(content)
        for parameter, flag in trained:
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        torch.random.set_rng_state(generators[2])


def python_state(model: nn.Module) -> dict[str, Any]:
    """Return every plain value that the model holds, by its path: numbers, texts, flags, lengths, own
    generators."""
    found: dict[str, Any] = {}
    for path, each in _held(model):
        found[path] = type(each).__name__, len(each) if isinstance(each, _CONTAINERS) else 0
        for key, value in _items(each):
            if (leaf := _leaf(value)) is not None:
                found[f"{path}.{key}" if path else str(key)] = leaf
    for path, parameter in model.named_parameters(remove_duplicate=False):
        found[f"{path}.requires_grad"] = parameter.requires_grad
    return found


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the paths that differ between two results of `python_state`."""
    keys = list(dict.fromkeys((*after, *before)))
    return [key for key in keys if key not in before or key not in after or before[key] != after[key]]


def generator_states() -> tuple[Any, bytes]:
    """Return the states of Python's and numpy's global generators, for comparison."""
    numpys: Any = np.random.get_state()
    return random.getstate(), numpys[1].tobytes() + repr(numpys[2:]).encode()


_CONTAINERS = (dict, list, set, deque)


def _held(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield, once and with their paths, the model's modules and each Python container and object that they
    hold."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        stack: list[tuple[str, Any, int]] = [(path, module, 0)]
        while stack and len(seen) < OBJECTS_MAX:
            name, each, depth = stack.pop()
            if id(each) in seen:
                continue
            seen.add(id(each))
            yield name, each
            if depth < _DEPTH_MAX:
                for key, value in _items(each):
                    if not isinstance(value, nn.Module) and _is_open(value):
                        stack.append((f"{name}.{key}" if name else str(key), value, depth + 1))


def _is_open(value: Any) -> bool:
    """Return whether the value may contain something that changes."""
    if isinstance(value, _CONTAINERS):
        return True
    if _leaf(value) is not None or isinstance(value, (*_PLAIN, *_OPAQUE, tuple)) or callable(value):
        return False
    return hasattr(value, "__dict__") and not type(value).__module__.startswith(("torch", "builtins", "re"))


def _items(each: Any) -> list[tuple[Any, Any]]:
    if isinstance(each, dict):
        return list(each.items())
    if isinstance(each, list | deque):
        return list(enumerate(each))
    if isinstance(each, set):
        return [(repr(item)[:80], item) for item in each]
    own = vars(each)
    if isinstance(each, nn.Module):
        return [(key, value) for key, value in own.items() if key not in _SEPARATE]
    return list(own.items())


def _leaf(value: Any) -> Any:
    """Return a value that can be compared. Return None if the value's content is compared separately, or if
    it equals only itself."""
    if isinstance(value, _PLAIN):
        return type(value).__name__, value
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return "size", str(value)
    if isinstance(value, tuple):
        return "tuple", tuple(_leaf(item) for item in value)
    if isinstance(value, random.Random):
        return "generator", value.getstate()
    if isinstance(value, np.random.Generator):
        return "generator", repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return "generator", repr(value.get_state(legacy=False))
    return None


def _content(each: Any) -> Any:
    if isinstance(each, dict):
        return dict(each)
    if isinstance(each, list | deque):
        return list(each)
    return set(each) if isinstance(each, set) else dict(vars(each))


def _put(each: Any, content: Any) -> None:
    held = each if isinstance(each, _CONTAINERS) else vars(each)
    is_same = len(held) == len(content)
    if is_same and isinstance(held, dict):
        # The order matters: hooks run in the order in which they are stored.
        pairs = zip(held.items(), content.items(), strict=True)
        is_same = all(key == other and value is same for (key, value), (other, same) in pairs)
    elif is_same and not isinstance(held, set):
        is_same = all(value is same for value, same in zip(held, content, strict=True))
    elif is_same:
        is_same = held == content
    if is_same:
        return
    held.clear()
    if isinstance(held, dict | set):
        held.update(content)
    else:
        held.extend(content)
