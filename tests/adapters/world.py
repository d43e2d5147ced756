"""A tiny JEM with everything that toolkits are known to disturb: flags, gradients, random numbers."""

import io
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from jem_robust import JEMClassifier, Refinement

SHAPE, CLASSES, COUNT, WRONG = (1, 8, 8), 4, 4, 3
EPS = {"linf": 0.1, "l2": 0.5, "l0": 4.0}


class TinyNet(nn.Module):
    """Images (N, 1, 8, 8) in [-1, 1] -> logits (N, 4); with BatchNorm, so that a train() by a toolkit would show."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.conv = nn.Conv2d(1, 4, 3, 2, 1)
            self.norm = nn.BatchNorm2d(4)
            self.head = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(nn.functional.silu(self.norm(2 * self.conv(x))).flatten(1))
        return logits


def jem(steps: int, **settings: Any) -> JEMClassifier:
    """JEM-k of the tiny network; its parameters hold gradients and its modules mixed flags, as a caller's might."""
    network = TinyNet()
    for parameter in network.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    network.head.bias.requires_grad_(False)
    network.train()
    network.conv.eval()
    refinement = Refinement(steps=steps, step_size=0.3, noise=0.01, chains=2 if steps else 1)
    return JEMClassifier(network, refinement, **{"input_shape": SHAPE, "num_classes": CLASSES, **settings})


def batch(model: JEMClassifier, count: int = COUNT) -> tuple[Tensor, Tensor]:
    """Images with what JEM-0 says of them for labels, except for image WRONG, which is wrong from the start."""
    images = torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(5))
    labels = model.with_refinement(steps=0)(images).argmax(1)
    if count > WRONG:
        labels[WRONG] = (labels[WRONG] + 1) % CLASSES
    return images, labels


def state(model: JEMClassifier) -> list[Any]:
    """All that has to stay as it was, in a form to compare."""
    modules = [m.training for m in model.modules()]
    parameters = [
        (p.requires_grad, id(p.grad), None if p.grad is None else p.grad.tolist(), p.device) for p in model.parameters()
    ]
    return [modules, parameters, [v.tolist() for v in model.state_dict().values()], model.seed]


def global_state() -> list[Any]:
    """Global random numbers and the like."""
    numbers: Any = np.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), numbers[1].tolist(), torch.is_grad_enabled()]


@contextmanager
def untouched(model: JEMClassifier, *tensors: Any, everything: bool = True) -> Iterator[None]:
    """Assert that the model, the tensors or arrays and (for everything) the global state are as before."""
    before, copies = state(model), [_copy(t) for t in tensors]
    outside, position = global_state(), model._position
    yield
    assert state(model) == before
    for tensor, copy in zip(tensors, copies, strict=True):
        assert np.array_equal(_copy(tensor), copy)
        assert getattr(tensor, "grad", None) is None
    if everything:
        assert global_state() == outside
        assert model._position == position


def _copy(tensor: Any) -> Any:
    return (tensor.detach().numpy() if isinstance(tensor, Tensor) else tensor).copy()


def seed_all(model: JEMClassifier, seed: int = 7) -> None:
    """What a user does to repeat a run."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    model.reseed(seed)


def reloaded(images: Any) -> Tensor:
    """Images as they come back from a float32 .npz file."""
    file = io.BytesIO()
    np.savez(file, images=torch.as_tensor(images).detach().numpy().astype(np.float32))
    file.seek(0)
    return torch.from_numpy(np.load(file)["images"])


def assert_within(adversarials: Any, images: Tensor, norm: str, eps: float | None) -> None:
    """In the box, and in the ball unless eps is None, within 1e-6 after saving and reloading."""
    x = reloaded(adversarials)
    assert x.shape == images.shape
    assert float(x.min()) >= -1e-6
    assert float(x.max()) <= 1 + 1e-6
    if eps is not None:
        change = (x.double() - images.double()).abs().flatten(1)
        size = {"linf": change.amax(1), "l2": change.norm(dim=1), "l0": (change > 1e-6).sum(1)}[norm]
        assert float(size.max()) <= eps + 1e-6


def assert_eot_averages_gradients(wrap: Callable[[JEMClassifier, int], Any]) -> None:
    """The loss's gradient through `wrap(model, 4)` is the mean of those of the same four draws, one by one."""
    model = jem(1)
    images, labels = batch(model)
    gradients: list[Tensor] = []
    for eot in (4, 1, 1, 1, 1):
        if len(gradients) < 2:
            model.reseed(2)
        x = images.clone().requires_grad_()
        nn.functional.cross_entropy(wrap(model, eot)(x), labels).backward()
        assert x.grad is not None
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[0], torch.stack(gradients[1:]).mean(0), rtol=1e-4, atol=1e-7)
