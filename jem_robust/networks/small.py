"""The small residual network of the embedded models: SiLU, no normalisation, quick on a CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Pre-activation residual block; the stride sits in the second convolution."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, stride, padding=1)
        self.shortcut = (
            nn.Conv2d(channels_in, channels_out, 1, stride)
            if stride != 1 or channels_in != channels_out
            else nn.Identity()
        )
        for layer in (self.conv1, self.conv2, self.shortcut):
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight)
                nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        with torch.no_grad():
            self.conv2.weight.mul_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels_in, H, W) -> (N, channels_out, H / stride, W / stride)."""
        residual: Tensor = self.conv2(F.silu(self.conv1(F.silu(x))))
        return residual + self.shortcut(x)  # type: ignore[no-any-return]


class SmallResNet(nn.Module):
    """4x4/2 convolution, three residual blocks, sum pooling / 4, linear: images (N, C, H, W) -> logits (N, K).

    width: channels after the first convolution; the blocks have 2, 4 and 4 times as many. H and W are free.
    """

    def __init__(self, channels: int = 1, num_classes: int = 10, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 4, 2, padding=1)
        nn.init.kaiming_normal_(self.stem.weight)
        nn.init.zeros_(self.stem.bias)  # type: ignore[arg-type]
        self.blocks = nn.Sequential(
            Block(width, 2 * width, 1), Block(2 * width, 4 * width, 2), Block(4 * width, 4 * width, 2)
        )
        self.head = nn.Linear(4 * width, num_classes)
        with torch.no_grad():  # sum pooling makes large logits, hence a steep energy, before anything is learnt
            self.head.weight.mul_(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, C, H, W) -> logits (N, K)."""
        features = F.silu(self.blocks(self.stem(x)))
        return self.head(features.sum((2, 3)) / 4)  # type: ignore[no-any-return]
