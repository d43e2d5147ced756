"""The memory format of training: fast, and never the one in which oneDNN spoils gradients."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from jem_robust.networks.small import SmallResNet
from jem_robust.networks.wide_resnet import WideResNet
from jem_robust.training.layout import memory_format

GRADIENTS = """
import torch
from jem_robust.networks.small import SmallResNet
from jem_robust.training.layout import memory_format
torch.manual_seed(0)
net = SmallResNet(1, 2, 2)
layout = memory_format(net)
x = torch.rand(32, 1, 32, 32)
def gradients(net, x):
    return torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
net = net.to(memory_format=layout)
found = [gradients(net, x.contiguous(memory_format=layout)) for _ in range(5)]
right = gradients(net.double(), x.double())
for each in found:
    for a, b in zip(each, right):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-4 * b.abs().max().item())
"""


@pytest.mark.parametrize(
    "network", [SmallResNet(), SmallResNet(3, 10, 8), WideResNet(depth=10, width=1), nn.Linear(2, 2)]
)
def test_networks_as_wide_as_any_in_use_train_in_channels_last(network: nn.Module) -> None:
    assert memory_format(network) == torch.channels_last


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(8, 32, 1, 2), nn.Conv2d(32, 32, 1, (1, 2), groups=4), SmallResNet(1, 2, 4)]
)
def test_narrow_strided_1x1_convolutions_do_not(layer: nn.Module) -> None:
    assert memory_format(nn.Sequential(nn.Conv2d(3, 8, 3), layer)) == torch.contiguous_format


def test_gradients_of_a_narrow_network_are_right_on_a_processor_with_avx2() -> None:
    run = subprocess.run(
        [sys.executable, "-c", GRADIENTS], env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
