"""Linear classifiers, for which every attack's answer is known in closed form."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from jem_robust_attacks.norms import distance
from jem_robust_attacks.result import AttackResult

SHAPE = (1, 4, 4)
NORMS = ["linf", "l2"]
Model = Callable[[Tensor], Tensor]


def world(n: int = 40, classes: int = 2, seed: int = 0) -> tuple[Model, Tensor, Tensor, Tensor]:
    """A linear classifier, images far enough from the box's sides, their labels and pairwise weight differences."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(classes, 16, generator=generator, dtype=torch.float64)
    images = 0.4 + 0.2 * torch.rand(n, *SHAPE, generator=generator, dtype=torch.float64)
    bias = -(weight @ images.flatten(1).mean(0))

    def linear(x: Tensor) -> Tensor:
        return x.flatten(1).to(weight) @ weight.T + bias

    return linear, images, linear(images).argmax(1), weight


def noisy(scale: float) -> tuple[Model, Tensor, Tensor]:
    linear, images, labels, _ = world()
    return lambda x: linear(x) + scale * torch.randn(len(x), 2, dtype=torch.float64), images, labels


def assert_valid(result: AttackResult, images: Tensor, norm: str, eps: float) -> None:
    saved = result.adversarials.numpy().astype(np.float32)
    assert saved.min() >= 0
    assert saved.max() <= 1
    far = distance(torch.from_numpy(saved), torch.from_numpy(images.numpy().astype(np.float32)), norm)
    assert far.max() <= eps + 1e-6
    assert torch.equal(torch.isfinite(result.distances), result.success)
    kept = ~result.success
    assert torch.equal(result.adversarials[kept], images[kept])
    assert result.adversarials.dtype == images.dtype
    torch.testing.assert_close(result.distances[result.success].float(), far[result.success].float(), atol=1e-3, rtol=0)


class Spy:
    """Counts rows; noisy unless told otherwise."""

    def __init__(self, model: Model, deterministic: bool | None = None) -> None:
        self.model, self.rows, self.calls = model, 0, 0
        if deterministic is not None:
            self.deterministic = deterministic

    def __call__(self, x: Tensor) -> Tensor:
        self.rows += len(x)
        self.calls += 1
        return self.model(x)
