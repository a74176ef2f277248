"""Models of images: plain and residual convolutions, skips across the net, depthwise ones, attention-free
mixing."""

from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from partition.capture.models.resnet18 import WIDTH, ResNet18
from partition.capture.models.simple_cnn import SimpleCNN
from tests.zoo.case import Case, Scale, Tensors, class_loss, correct, images


def simple_cnn(scale: Scale) -> Case:
    """The built-in CIFAR-10 net: three convolutions, two linear layers, dropout."""
    side = 32 if scale == "bench" else 8
    return Case(
        "simple-cnn",
        lambda: SimpleCNN((3, side, side), 10),
        images(3, side, side, classes=10),
        class_loss,
        {"correct": correct},
        batch=32 if scale == "bench" else 3,
    )


def resnet18(scale: Scale) -> Case:
    """The built-in ResNet-18: batch norm, residual sums, convolutions with stride."""
    side, width = (32, WIDTH) if scale == "bench" else (16, 4)
    return Case(
        "resnet18",
        lambda: ResNet18(3, 10, small=True, width=width),
        images(3, side, side, classes=10),
        class_loss,
        {"correct": correct},
        batch=16 if scale == "bench" else 2,
    )


class DoubleConvolution(nn.Sequential):
    """Convolution, batch norm, ReLU, twice."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__(
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """Ronneberger et al. 2015: each level's features skip over all deeper ones."""

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.enter = DoubleConvolution(3, width)
        self.down = nn.ModuleList(DoubleConvolution(a, b) for a, b in pairwise(widths))
        deep = widths[::-1]
        self.raise_ = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in pairwise(deep))
        self.up = nn.ModuleList(DoubleConvolution(2 * b, b) for b in deep[1:])
        self.leave = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 3, side, side) to (batch, classes, side, side)."""
        x = self.enter(x)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(functional.max_pool2d(x, 2))
        for raise_, up, skip in zip(self.raise_, self.up, reversed(skips), strict=True):
            x = up(torch.cat((skip, raise_(x)), dim=1))
        return cast(Tensor, self.leave(x))


def pixel_accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum over samples of the share of pixels that are classified right."""
    return (logits.argmax(1) == labels).to(logits.dtype).mean((1, 2)).sum()


def pixel_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum over samples of the mean loss over pixels."""
    each = functional.cross_entropy(logits, labels, reduction="none")
    return each.mean((1, 2)).sum()


def unet(scale: Scale) -> Case:
    """Segmentation: every skip connection spans much of the net, so boundaries carry several tensors."""
    side, width, depth = (64, 16, 4) if scale == "bench" else (8, 4, 2)

    def sample(generator: torch.Generator, batch: int) -> tuple[Tensors, Tensors]:
        pictures = torch.randn(batch, 3, side, side, generator=generator)
        return (pictures,), (torch.randint(5, (batch, side, side), generator=generator),)

    return Case(
        "unet",
        lambda: UNet(width, depth, 5),
        sample,
        pixel_loss,
        {"pixel_accuracy": pixel_accuracy},
        batch=8 if scale == "bench" else 3,
    )


class SqueezeExcite(nn.Module):
    """Scale channels by a summary of the whole image (Hu et al. 2018)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.squeeze = nn.Conv2d(channels, max(4, channels // 4), 1)
        self.excite = nn.Conv2d(max(4, channels // 4), channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape."""
        scale = functional.relu(self.squeeze(self.pool(x)))
        return x * functional.hardsigmoid(self.excite(scale))


class InvertedResidual(nn.Module):
    """MobileNetV3's block: widen, one filter per channel, squeeze and excite, narrow."""

    def __init__(self, before: int, after: int, stride: int, *, hard: bool) -> None:
        super().__init__()
        hidden = 4 * before
        act: nn.Module = nn.Hardswish(inplace=True) if hard else nn.ReLU6(inplace=True)
        self.block = nn.Sequential(
            nn.Conv2d(before, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            act,
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden, momentum=0.01, eps=0.001),
            act,
            SqueezeExcite(hidden),
            nn.Conv2d(hidden, after, 1, groups=2, bias=False),
            nn.BatchNorm2d(after),
        )
        self.skips = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, before, side, side) to (batch, after, side / stride, side / stride)."""
        y = self.block(x)
        return x + y if self.skips else cast(Tensor, y)


class MobileNet(nn.Module):
    """A short MobileNetV3 with a grouped projection."""

    def __init__(self, width: int, repeats: int, classes: int) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for level in range(3):
            blocks.append(InvertedResidual(width << max(0, level - 1), width << level, 2, hard=level > 1))
            blocks.extend(
                InvertedResidual(width << level, width << level, 1, hard=level > 1) for _ in range(repeats)
            )
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.Hardswish()
        )
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width << 2, 8 * width),
            nn.Hardswish(inplace=True),
            nn.Dropout(0.2, inplace=True),
            nn.Linear(8 * width, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 3, side, side) to (batch, classes)."""
        return cast(Tensor, self.head(self.blocks(self.stem(x))))


def mobilenet(scale: Scale) -> Case:
    """A model with grouped and depthwise convolutions, in-place activations, and gates."""
    side, width, repeats = (64, 16, 3) if scale == "bench" else (16, 4, 1)
    return Case(
        "mobilenet",
        lambda: MobileNet(width, repeats, 10),
        images(3, side, side, classes=10),
        class_loss,
        {"correct": correct},
        batch=16 if scale == "bench" else 3,
    )


class DenseNet(nn.Module):
    """Huang et al. 2017: every layer reads all earlier ones of its block."""

    def __init__(self, growth: int, layers: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 2 * growth, 3, padding=1)
        self.blocks = nn.ModuleList()
        self.transitions = nn.ModuleList()
        width = 2 * growth
        for _ in range(2):
            block = nn.ModuleList()
            for _ in range(layers):
                block.append(
                    nn.Sequential(
                        nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, growth, 3, padding=1, bias=False)
                    )
                )
                width += growth
            self.blocks.append(block)
            self.transitions.append(nn.Conv2d(width, width // 2, 1))
            width //= 2
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 3, side, side) to (batch, classes)."""
        x = self.stem(x)
        for block, transition in zip(self.blocks, self.transitions, strict=True):
            features = [x]
            for layer in cast(nn.ModuleList, block):
                features.append(layer(torch.cat(features, 1)))
            x = functional.avg_pool2d(transition(torch.cat(features, 1)), 2)
        return cast(Tensor, self.head(x.mean((2, 3))))


def densenet(scale: Scale) -> Case:
    """Concatenations of all earlier layers, which make the widest bundles of the zoo."""
    side, growth, layers = (32, 16, 6) if scale == "bench" else (8, 4, 3)
    return Case(
        "densenet",
        lambda: DenseNet(growth, layers, 10),
        images(3, side, side, classes=10),
        class_loss,
        {"correct": correct},
        batch=16 if scale == "bench" else 3,
    )


class Autoencoder(nn.Module):
    """An autoencoder: group norm on the way down, transposed convolutions up, back to the image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1),
            nn.GroupNorm(2, width),
            nn.SiLU(),
            nn.Conv2d(width, 2 * width, 4, 2, 1),
            nn.GroupNorm(4, 2 * width),
            nn.SiLU(),
            nn.Conv2d(2 * width, 4, 1),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(4, 2 * width, 1),
            nn.LeakyReLU(0.1),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
            nn.InstanceNorm2d(width, affine=True),
            nn.GELU(),
            nn.Upsample(scale_factor=2, mode="nearest"),
            nn.Conv2d(width, 3, 3, padding=1),
            nn.Tanh(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 3, side, side) to the same shape."""
        return cast(Tensor, self.decoder(self.encoder(x)))


def reconstruction(output: Tensor, target: Tensor) -> Tensor:
    """Return the sum over samples of the mean squared error."""
    return functional.mse_loss(output, target, reduction="none").mean((1, 2, 3)).sum()


def absolute_error(output: Tensor, target: Tensor) -> Tensor:
    """Return the sum over samples of the mean absolute error."""
    return functional.l1_loss(output, target, reduction="none").mean((1, 2, 3)).sum()


def autoencoder(scale: Scale) -> Case:
    """A task without classes: the label is the image."""
    side, width = (32, 32) if scale == "bench" else (8, 4)

    def sample(generator: torch.Generator, batch: int) -> tuple[Tensors, Tensors]:
        picture = torch.rand(batch, 3, side, side, generator=generator)
        return (picture,), (picture.clone(),)

    return Case(
        "autoencoder",
        lambda: Autoencoder(width),
        sample,
        reconstruction,
        {"absolute_error": absolute_error},
        batch=16 if scale == "bench" else 3,
    )


class Siamese(nn.Module):
    """One tower is applied to two images, so every weight is used twice (Bromley et al. 1993)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tower = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(8 * width, 16),
        )

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Map two images (batch, 1, side, side) to two embeddings (batch, 16)."""
        return self.tower(left), self.tower(right)


def contrastive(output: tuple[Tensor, Tensor], same: Tensor) -> Tensor:
    """The contrastive loss of Hadsell et al. 2006, with the cosine as distance."""
    distance = 1 - functional.cosine_similarity(*output)
    return (same * distance.square() + (1 - same) * functional.relu(0.5 - distance).square()).sum()


def siamese(scale: Scale) -> Case:
    """A model with shared weights, two inputs, two outputs, and batch norm used twice in one micro-batch."""
    side, width = (32, 16) if scale == "bench" else (8, 4)

    def sample(generator: torch.Generator, batch: int) -> tuple[Tensors, Tensors]:
        left, right = torch.randn(2, batch, 1, side, side, generator=generator).unbind()
        return (left, right), (torch.randint(2, (batch,), generator=generator).float(),)

    return Case("siamese", lambda: Siamese(width), sample, contrastive, batch=32 if scale == "bench" else 3)


class MixerBlock(nn.Module):
    """One block of MLP-Mixer (Tolstikhin et al. 2021)."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.places = nn.Sequential(nn.Linear(places, 2 * places), nn.GELU(), nn.Linear(2 * places, places))
        self.after = nn.LayerNorm(width)
        self.channels = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, places, width) to the same shape."""
        x = x + self.places(self.before(x).transpose(1, 2)).transpose(1, 2)
        return x + cast(Tensor, self.channels(self.after(x)))


class Mixer(nn.Module):
    """Patches, mixed alternately over places and over channels."""

    def __init__(self, side: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.Sequential(*(MixerBlock((side // 4) ** 2, width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 3, side, side) to (batch, classes)."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        return cast(Tensor, self.head(self.norm(self.blocks(x)).mean(1)))


def mixer(scale: Scale) -> Case:
    """A model with transposes between matrix products: views that a boundary must make contiguous."""
    side, width, layers = (32, 128, 4) if scale == "bench" else (16, 8, 2)
    return Case(
        "mixer",
        lambda: Mixer(side, width, layers, 10),
        images(3, side, side, classes=10),
        class_loss,
        {"correct": correct},
        batch=16 if scale == "bench" else 3,
    )
