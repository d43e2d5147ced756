"""The wide residual network of the 2019 JEM code, with its parameter names, so that its files load unchanged."""

import re
from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

STEM_WIDTH = 16
IMAGE_SIZE = 32  # the last feature map must be the 8x8 that is pooled into one number a channel


def _leaky(x: Tensor) -> Tensor:
    return F.leaky_relu(x, 0.2)


class _Block(nn.Module):
    """(N, A, H, W) -> (N, B, H/stride, W/stride); the stride sits in the second convolution."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, stride, padding=1)
        # A Sequential even where it is empty: the files call the 1x1 convolution "shortcut.0".
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels_out:
            self.shortcut.append(nn.Conv2d(channels_in, channels_out, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        residual: Tensor = self.conv2(_leaky(self.conv1(_leaky(x))))
        return residual + self.shortcut(x)  # type: ignore[no-any-return]


class _Trunk(nn.Module):
    """Images (N, C, 32, 32) -> features (N, 64 width)."""

    def __init__(self, channels: int, num_classes: int, blocks: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, STEM_WIDTH, 3, padding=1)
        self.layer1 = _stage(STEM_WIDTH, 16 * width, blocks, 1)
        self.layer2 = _stage(16 * width, 32 * width, blocks, 2)
        self.layer3 = _stage(32 * width, 64 * width, blocks, 2)
        self.linear = nn.Linear(64 * width, num_classes)  # never used: kept because the files hold it

    def forward(self, x: Tensor) -> Tensor:
        maps = self.layer3(self.layer2(self.layer1(self.conv1(x))))
        return F.avg_pool2d(_leaky(maps), 8).flatten(1)


def _stage(channels_in: int, channels_out: int, blocks: int, stride: int) -> nn.Sequential:
    first = _Block(channels_in, channels_out, stride)
    return nn.Sequential(first, *(_Block(channels_out, channels_out, 1) for _ in range(blocks - 1)))


class WideResNet(nn.Module):
    """Pre-activation wide ResNet, LeakyReLU(.2), biases, no normalisation: (N, C, 32, 32) -> logits (N, K).

    The network of Grathwohl et al. (ICLR 2020, arXiv 1912.03263): depth 28, width 10, images in [-1, 1], where its
    own range is the caller's business. depth: 6n + 4 with n >= 1 blocks a layer; width: the factor on 16, 32 and 64
    channels. `energy_output` and `f.linear` take no part in the logits (and get no gradient); they are in the files.
    Weights start as PyTorch's layers do, as in that code.

    Raises ValueError for impossible settings, and in the forward for images of another shape.
    """

    def __init__(self, channels: int = 3, num_classes: int = 10, depth: int = 28, width: int = 10) -> None:
        super().__init__()
        for name, value in (("channels", channels), ("num_classes", num_classes), ("depth", depth), ("width", width)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"expected {name} to be an int of at least 1, got {value!r}")
        if depth < 10 or depth % 6 != 4:
            raise ValueError(f"expected depth = 6n + 4 with n >= 1, got {depth}: take 10, 16, 22, 28, ...")
        self.channels = channels
        self.f = _Trunk(channels, num_classes, (depth - 4) // 6, width)
        self.energy_output = nn.Linear(64 * width, 1)
        self.class_output = nn.Linear(64 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, C, 32, 32) -> logits (N, K)."""
        expected = (self.channels, IMAGE_SIZE, IMAGE_SIZE)
        if x.ndim != 4 or tuple(x.shape[1:]) != expected:
            raise ValueError(f"expected images (N, {', '.join(map(str, expected))}), got {tuple(x.shape)}: resize them")
        return self.class_output(self.f(x))  # type: ignore[no-any-return]


def infer_wide_resnet(state_dict: Mapping[str, Tensor]) -> dict[str, int]:
    """The settings {channels, num_classes, depth, width} of a `WideResNet`, from the shapes of its weights alone.

    Only what the settings need is looked at; whether every weight fits is for `load_state_dict` to say.
    Raises ValueError where no setting makes such shapes.
    """
    stem = _shape(state_dict, "f.conv1.weight", 4)
    head = _shape(state_dict, "class_output.weight", 2)
    names = "\n".join(state_dict)
    blocks = [len(re.findall(rf"^f\.layer{i}\.\d+\.conv1\.weight$", names, re.MULTILINE)) for i in (1, 2, 3)]
    if len(set(blocks)) > 1 or not blocks[0]:
        raise ValueError(f"expected equally many blocks, at least 1, in f.layer1 to f.layer3, got {blocks}")
    if stem[0] != STEM_WIDTH or head[1] < 64 or head[1] % 64:
        raise ValueError(
            f"expected f.conv1 with {STEM_WIDTH} outputs and class_output with 64 * width inputs, "
            f"got {stem[0]} and {head[1]}: this is another network, name its architecture"
        )
    return {"channels": stem[1], "num_classes": head[0], "depth": 6 * blocks[0] + 4, "width": head[1] // 64}


def _shape(state_dict: Mapping[str, Tensor], name: str, ndim: int) -> tuple[int, ...]:
    shape = tuple(state_dict[name].shape) if name in state_dict else None
    if shape is None or len(shape) != ndim:
        raise ValueError(f"expected {name} with {ndim} dimensions, got {shape or 'none'}: not the 2019 JEM layout")
    return shape
