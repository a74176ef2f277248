"""Small versions of torchvision's model families for the corpus: each is built from its own classes, with few
and narrow layers.

Detectors are left out, because they need torchvision's C++ operators, which a CPU build of torch cannot load,
and choose boxes depending on the data. Quantized models are left out, too. Without torchvision there are no
rows.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 5
_OPERATORS = ("nms", "qnms")
"""Operators whose shapes torchvision registers on import, even if they do not exist."""
_library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's


@dataclass(frozen=True)
class Vision:
    """One family. `shape` is the shape of a sample; `kind` is the kind of prediction."""

    make: Callable[[Any], nn.Module]
    shape: tuple[int, ...]
    kind: str = "class"


def is_installed() -> bool:
    """Return whether torchvision is installed."""
    return importlib.util.find_spec("torchvision") is not None


def prepare() -> None:
    """Let torchvision be imported without its C++ operators, even by transformers."""
    for name in _OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


if is_installed():
    prepare()


def _narrow(model: Any) -> nn.Module:
    """Narrow the head of an old model with fully connected layers."""
    linear = [place for place, layer in enumerate(model.classifier) if isinstance(layer, nn.Linear)]
    sizes = [model.classifier[linear[0]].in_features, 32, 32, CLASSES]
    for place, (before, after) in zip(linear, pairwise(sizes), strict=True):
        model.classifier[place] = nn.Linear(before, after)
    made: nn.Module = model
    return made


def _resnet(models: Any, **settings: Any) -> Any:
    return models.resnet.ResNet(models.resnet.Bottleneck, [1, 1, 1, 1], num_classes=CLASSES, **settings)


def _video(models: Any, makers: str, stem: str = "BasicStem") -> Any:
    video = models.video.resnet
    first, *others = (getattr(video, name) for name in makers.split())
    return video.VideoResNet(
        video.BasicBlock, [first, *(others * 3 or [first] * 3)], [1, 1, 1, 1], getattr(video, stem), CLASSES
    )


def _swin(models: Any, version: int) -> Any:
    swin = models.swin_transformer
    own = (
        {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
        if version == 2
        else {}
    )
    return swin.SwinTransformer(
        [4, 4], 16, [1, 2], [2, 4], [4, 4], stochastic_depth_prob=0.2, num_classes=CLASSES, **own
    )


def _mvit(models: Any) -> Any:
    mvit = models.video.mvit
    blocks = [
        mvit.MSBlockConfig(1, 16, 16, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
        mvit.MSBlockConfig(2, 16, 32, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 1, 1]),
    ]
    return mvit.MViT(
        (32, 32), 4, blocks, True, True, True, True, dropout=0.0, num_classes=CLASSES,
        stochastic_depth_prob=0.2,
    )  # fmt: skip


def _convnext(models: Any) -> Any:
    convnext = models.convnext
    blocks = [convnext.CNBlockConfig(16, 24, 1), convnext.CNBlockConfig(24, None, 2)]
    return convnext.ConvNeXt(blocks, stochastic_depth_prob=0.2, num_classes=CLASSES)


def _efficientnet_v2(models: Any) -> Any:
    parts = models.efficientnet
    blocks = [parts.FusedMBConvConfig(4, 3, 2, 8, 16, 2), parts.MBConvConfig(4, 3, 2, 16, 24, 2)]
    return parts.EfficientNet(blocks, 0.0, num_classes=CLASSES, last_channel=64)


def _s3d(models: Any) -> Any:
    model = models.video.S3D(CLASSES, dropout=0.0)
    model.avgpool = nn.AvgPool3d((2, 2, 2), stride=1)  # the original pool is for 224 pixels
    return model


def _dilated(models: Any) -> Any:
    return _resnet(models, replace_stride_with_dilation=[False, True, True])


IMAGE, CLIP = (3, 32, 32), (3, 4, 32, 32)
FAMILIES: Mapping[str, Vision] = MappingProxyType(
    {
        "alexnet": Vision(lambda m: _narrow(m.alexnet(dropout=0.0)), (3, 64, 64)),
        "convnext": Vision(_convnext, IMAGE),
        "deeplabv3": Vision(
            lambda m: m.segmentation.deeplabv3._deeplabv3_resnet(_dilated(m), CLASSES, None), IMAGE, "pixels"
        ),
        "densenet": Vision(
            lambda m: m.DenseNet(8, (2, 2, 2, 2), 16, num_classes=CLASSES, memory_efficient=False), IMAGE
        ),
        "efficientnet": Vision(lambda m: m.efficientnet_b0(num_classes=CLASSES, dropout=0.0), IMAGE),
        "efficientnet_v2": Vision(_efficientnet_v2, IMAGE),
        "fcn": Vision(lambda m: m.segmentation.fcn._fcn_resnet(_dilated(m), CLASSES, None), IMAGE, "pixels"),
        "googlenet": Vision(
            lambda m: m.GoogLeNet(CLASSES, init_weights=False, dropout=0.0, dropout_aux=0.0), (3, 64, 64)
        ),
        "inception_v3": Vision(
            lambda m: m.Inception3(CLASSES, aux_logits=False, init_weights=False, dropout=0.0), (3, 80, 80)
        ),
        "lraspp": Vision(
            lambda m: m.segmentation.lraspp._lraspp_mobilenetv3(m.mobilenet_v3_small(dilated=True), CLASSES),
            (3, 64, 64),
            "pixels",
        ),
        "maxvit": Vision(
            lambda m: m.MaxVit((32, 32), 16, 4, [16, 32], [1, 2], 8, 0.2, num_classes=CLASSES), IMAGE
        ),
        "mnasnet": Vision(lambda m: m.MNASNet(0.5, CLASSES, dropout=0.0), IMAGE),
        "mobilenet_v2": Vision(lambda m: m.MobileNetV2(CLASSES, 0.5, dropout=0.0), IMAGE),
        "mobilenet_v3": Vision(lambda m: m.mobilenet_v3_small(num_classes=CLASSES, dropout=0.0), IMAGE),
        "mvit": Vision(_mvit, CLIP),
        "raft": Vision(lambda m: m.optical_flow.raft_small(), (2, 3, 128, 128), "flow"),
        "regnet_x": Vision(lambda m: m.regnet_x_400mf(num_classes=CLASSES), IMAGE),
        "regnet_y": Vision(lambda m: m.regnet_y_400mf(num_classes=CLASSES), IMAGE),
        "resnet": Vision(lambda m: m.resnet18(num_classes=CLASSES), IMAGE),
        "resnet_bottleneck": Vision(_resnet, IMAGE),
        "resnext": Vision(lambda m: _resnet(m, groups=32, width_per_group=4), IMAGE),
        "s3d": Vision(_s3d, (3, 16, 64, 64)),
        "shufflenet_v2": Vision(lambda m: m.shufflenet_v2_x0_5(num_classes=CLASSES), IMAGE),
        "squeezenet": Vision(lambda m: m.SqueezeNet("1_1", CLASSES, dropout=0.0), IMAGE),
        "swin": Vision(lambda m: _swin(m, 1), IMAGE),
        "swin_v2": Vision(lambda m: _swin(m, 2), IMAGE),
        "swin3d": Vision(
            lambda m: m.video.SwinTransformer3d(
                [2, 4, 4], 16, [1, 2], [2, 4], [2, 4, 4], stochastic_depth_prob=0.2, num_classes=CLASSES
            ),
            CLIP,
        ),
        "vgg": Vision(lambda m: _narrow(m.vgg11(dropout=0.0)), IMAGE),
        "vgg_bn": Vision(lambda m: _narrow(m.vgg11_bn(dropout=0.0)), IMAGE),
        "video_mc3": Vision(lambda m: _video(m, "Conv3DSimple Conv3DNoTemporal"), CLIP),
        "video_r2plus1d": Vision(lambda m: _video(m, "Conv2Plus1D", "R2Plus1dStem"), CLIP),
        "video_r3d": Vision(lambda m: _video(m, "Conv3DSimple"), CLIP),
        "vit": Vision(lambda m: m.VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=CLASSES), IMAGE),
        "wide_resnet": Vision(lambda m: _resnet(m, width_per_group=128), IMAGE),
    }
)


class Flow(nn.Module):
    """Optical flow between two pictures, with two updates."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pair: Tensor) -> Any:
        return self.model(pair[:, 0], pair[:, 1], num_flow_updates=2)


def build(name: str) -> nn.Module:
    """Return a small model of a family."""
    made = FAMILIES[name].make(importlib.import_module("torchvision.models"))
    return Flow(made) if FAMILIES[name].kind == "flow" else made


def draw(name: str, generator: torch.Generator, batch: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return noise, and labels for the family."""
    vision = FAMILIES[name]
    given = torch.randn(batch, *vision.shape, generator=generator, dtype=torch.float64)
    if vision.kind == "flow":
        sides = (batch, 2, *vision.shape[-2:])
        return (given,), (torch.randn(sides, generator=generator, dtype=torch.float64),)
    sides = (batch, *vision.shape[-2:]) if vision.kind == "pixels" else (batch,)
    return (given,), (torch.randint(CLASSES, sides, generator=generator),)


def loss(output: Any, labels: Tensor) -> Tensor:
    """Return the cross entropy of all heads, or the distance of flows; for pixels, the mean per picture."""
    if isinstance(output, list):
        return torch.stack([(flow - labels).abs().flatten(1).mean(1).sum() for flow in output]).sum()
    if isinstance(output, dict):
        heads = [output["out"]]
        sides = labels.shape[-2] * labels.shape[-1]
        return functional.cross_entropy(heads[0], labels, reduction="sum") / sides
    if isinstance(output, tuple):
        first, *others = (head for head in output if head is not None)
        total = functional.cross_entropy(first, labels, reduction="sum")
        for head in others:
            total = total + 0.3 * functional.cross_entropy(head, labels, reduction="sum")
        return total
    return functional.cross_entropy(output, labels, reduction="sum")
