"""Closed-form and tiny test worlds: networks whose answers are known or cheap to compute in full."""

import torch
from torch import Tensor, nn

from jem_robust.langevin import Refinement

SHAPE = (1, 5, 5)
CLASSES = 3


def smooth_cnn(seed: int = 0, classes: int = CLASSES, channels: int = 1) -> nn.Sequential:
    """A float64 network with curvature everywhere."""
    return _cnn(nn.Softplus(), seed, classes, channels)


def leaky_cnn(seed: int = 0, classes: int = CLASSES, channels: int = 1) -> nn.Sequential:
    """A float64 network that is piecewise linear, as the 2019 ones are."""
    return _cnn(nn.LeakyReLU(0.2), seed, classes, channels)


def _cnn(activation: nn.Module, seed: int, classes: int, channels: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = nn.Sequential(
            nn.Conv2d(channels, 4, 3, padding=1), activation, nn.Conv2d(4, 4, 3), activation,
            nn.Flatten(), nn.Linear(4 * 9, classes),
        ).double()  # fmt: skip
        for parameter in network.parameters():
            parameter.data.mul_(4)
    return network


class NormedNet(nn.Module):
    """BatchNorm and Dropout: nonsense unless computed in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.Sequential(
                nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(36, CLASSES)
            ).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class GaussianNet(nn.Module):
    """Logits -c|x - m|^2 / 2 + offset_y: log p(x) is Gaussian with score -c (x - m), Hessian -c. No parameters."""

    def __init__(self, curvature: float = 0.5, mean: float = 0.2) -> None:
        super().__init__()
        self.curvature, self.mean = curvature, mean

    def forward(self, x: Tensor) -> Tensor:
        value = -0.5 * self.curvature * (x - self.mean).square().flatten(1).sum(1, keepdim=True)
        return value + torch.tensor([0.0, 1.0, -1.0], dtype=x.dtype)


class GaussianEnergy(GaussianNet):
    """log p(x) alone: (N,)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, 0]


class LinearNet(nn.Module):
    """Logits W x: closed-form gradients. One class makes log p(x) linear, with no Hessian at all."""

    def __init__(self, classes: int = CLASSES, shape: tuple[int, ...] = SHAPE) -> None:
        super().__init__()
        size = torch.Size(shape).numel()
        weight = torch.linspace(-1, 1, classes * size, dtype=torch.float64).reshape(classes, size).sin()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.weight.T


class NoisyNet(nn.Module):
    """A network that itself draws from torch's global RNG."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = smooth_cnn()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + 0.1 * torch.randn_like(x))


def images(count: int, seed: int = 0, shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float64) -> Tensor:
    """Seeded images in [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, *shape, generator=generator, dtype=torch.float64).to(dtype)


def quick(**changes: object) -> Refinement:
    """A refinement with every ingredient, short enough for tests."""
    settings = {"steps": 2, "step_size": 0.1, "noise": 0.05, "init_noise": 0.03, "chains": 3, **changes}
    return Refinement(**settings)  # type: ignore[arg-type]
