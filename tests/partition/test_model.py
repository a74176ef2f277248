"""The model as data agrees with torch: names, shapes, FLOPs and what autograd keeps."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from partition.model import Conv2d, Dropout, Flatten, Layer, Linear, MaxPool2d, ReLU, build


def _module(layer: Layer) -> torch.nn.Module:
    match layer:
        case Conv2d():
            return torch.nn.Conv2d(layer.channels_in, layer.channels_out, layer.kernel, padding=layer.padding)
        case MaxPool2d():
            return torch.nn.MaxPool2d(layer.size)
        case ReLU():
            return torch.nn.ReLU()
        case Flatten():
            return torch.nn.Flatten()
        case Linear():
            return torch.nn.Linear(layer.features_in, layer.features_out)
        case Dropout():
            return torch.nn.Dropout(layer.probability)
    raise AssertionError(layer)


@pytest.mark.parametrize("sample_shape", [(1, 8, 8), (3, 32, 32), (1, 11, 9)])
def test_names_and_shapes_are_those_of_torch(sample_shape: tuple[int, ...]) -> None:
    model = build("simple-cnn", sample_shape, 10)
    modules = torch.nn.Sequential()
    for layer in model.layers:
        modules.add_module(layer.name, _module(layer))
    ours = [(parameter.name, parameter.shape) for parameter in model.parameters()]
    theirs = [(name, tuple(tensor.shape)) for name, tensor in modules.state_dict().items()]
    assert ours == theirs
    values = torch.zeros(2, *sample_shape)
    for module, shape in zip(modules, model.shapes[1:], strict=True):
        values = module(values)
        assert tuple(values.shape) == (2, *shape)


def test_for_cifar_it_is_the_model_of_the_seed_project() -> None:
    shapes = {
        parameter.name: parameter.shape for parameter in build("simple-cnn", (3, 32, 32), 10).parameters()
    }
    assert shapes["conv3.weight"] == (128, 64, 3, 3)
    assert shapes["fc1.weight"] == (512, 128 * 4 * 4)
    assert shapes["fc2.weight"] == (10, 512)


def test_flops_of_products_are_what_torch_counts() -> None:
    model = build("simple-cnn", (3, 16, 16), 10)
    for index, layer in enumerate(model.layers):
        if not layer.parameters:
            continue
        with FlopCounterMode(display=False) as counter:
            _module(layer)(torch.zeros(4, *model.shapes[index]))
        assert model.flops(index) * 4 == counter.get_total_flops()


def test_autograd_keeps_no_more_than_the_model_says() -> None:
    model = build("simple-cnn", (3, 16, 16), 10)
    kept = 0
    seen: set[int] = set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        if tensor.data_ptr() not in seen and not isinstance(tensor, torch.nn.Parameter):
            seen.add(tensor.data_ptr())
            kept += tensor.nbytes
        return tensor

    modules = torch.nn.Sequential(*(_module(layer) for layer in model.layers))
    weights = {parameter.data_ptr() for parameter in modules.parameters()}
    seen |= weights  # a linear layer keeps a transposed view of its weight
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        modules(torch.zeros(4, *model.shapes[0], requires_grad=True))
    promised = sum(model.saved_bytes(index, 4) for index in range(len(model.layers))) * 4
    assert kept <= promised <= 2 * kept


def test_an_unknown_model_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValueError, match=r"'gpt-9'; known: simple-cnn"):
        build("gpt-9", (1, 8, 8), 10)


@pytest.mark.parametrize(
    ("sample_shape", "classes"),
    [((8, 8), 10), ((1, 7, 8), 10), ((1, 8, 8), 0), ((1, 8, 1 << 20), 10), ((0, 8, 8), 10), ((), 10)],
)
def test_a_sample_it_cannot_take_is_refused(sample_shape: tuple[int, ...], classes: int) -> None:
    with pytest.raises(ValueError, match=r"simple-cnn wants|sides of a sample|classes are"):
        build("simple-cnn", sample_shape, classes)
