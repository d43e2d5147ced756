"""The memory format to train in."""

import torch
from torch import nn

BLOCK = 16  # channels oneDNN takes at once with AVX-512; 8 with AVX2


def memory_format(network: nn.Module) -> torch.memory_format:
    """channels_last, which is faster on a CPU, except where it would spoil the weights' gradients.

    For a strided 1x1 convolution of fewer input channels than a block, oneDNN's kernel for the gradient of a
    channels_last weight writes past its workspace (uxlfoundation/oneDNN issue 6035): what comes back is wrong and
    another at every run.
    """
    narrow = any(
        isinstance(m, nn.Conv2d) and max(m.kernel_size) == 1 < max(m.stride) and m.in_channels // m.groups < BLOCK
        for m in network.modules()
    )
    return torch.contiguous_format if narrow else torch.channels_last
