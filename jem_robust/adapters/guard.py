"""What toolkits get to see of a model: modules that keep their side effects away from it.

Reasons, read from the toolkits' source: ART 1.20.1 switches training flags and wipes parameter gradients, torchattacks
3.5.1 calls train() on the whole model, Foolbox 3.3.4 asks for a model in eval mode and moves it to a GPU.
"""

from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from jem_robust.classifier import JEMClassifier

HALF = 0.5


def missing(module: str, remedy: str, error: ImportError) -> ImportError:
    """The ImportError for a toolkit that is not there, naming what to install and what really failed."""
    return ImportError(f"expected {module}, which cannot be imported ({error}): {remedy}")


def check_model(model: Any, eot: int = 1) -> None:
    """Raise TypeError unless model is a JEMClassifier, ValueError unless eot is a whole number from 1 up."""
    if not isinstance(model, JEMClassifier):
        raise TypeError(f"expected a JEMClassifier, got {type(model).__name__}: wrap it in jr.JEMClassifier")
    check_eot(eot)


def check_eot(eot: Any) -> None:
    """Raise ValueError unless eot is a whole number from 1 up."""
    if isinstance(eot, bool) or not isinstance(eot, int) or eot < 1:
        raise ValueError(f"expected eot to be a whole number from 1 up, got {eot!r}")


class Guarded(nn.Module):
    """A module around `model` (which it holds, no copy) that toolkits cannot switch to training or clear gradients of.

    Images (N, C, H, W) in [0, 1] -> logits (N, K) on the images' device, with the next noise of the model's plain
    stream. eot: draws whose logits are averaged where the images require a gradient; without one it is a single draw.
    Its network computes in eval mode always, so train() and eval() do nothing here; reach the model as `.model`.
    """

    bounds = (0.0, 1.0)

    def __init__(self, model: nn.Module, eot: int = 1) -> None:
        super().__init__()
        check_eot(eot)
        self.model, self.eot = model, eot
        self.training = False

    def forward(self, images: Tensor) -> Tensor:
        """One draw, or the mean of `eot` draws where a gradient is asked for."""
        draws = self.eot if torch.is_grad_enabled() and images.requires_grad else 1
        logits: Tensor = sum(self._draw(images) for _ in range(draws)) / draws  # type: ignore[assignment]
        return logits.to(images.device)

    def _draw(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(images)
        return logits

    def train(self, mode: bool = True) -> Self:
        """Nothing: toolkits may not switch the model's mode."""
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: the parameters' gradients belong to the caller and never come from here."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The model's; one empty parameter without any, since torchattacks reads the device off the first."""
        own = list(super().parameters(recurse))
        return iter(own or [nn.Parameter(torch.empty(0, device=self.device), requires_grad=False)])

    @property
    def device(self) -> torch.device:
        """Where the model is now."""
        device: torch.device = self.model.device  # type: ignore[assignment]
        return device


class Draws(Guarded):
    """What a toolkit's attack on `count` images runs on: keyed fresh noise for every call, and bookkeeping.

    target: something with draw(images, image_ids, draw_ids, purpose, seed) and bounds, kept out of the toolkit's
    reach. Images come in [0, 1] whatever the target's bounds; attacks that look outside of the box see its edge, with
    the gradient passed through. Rows of a call have the noise ids 0, 1, ... and every call a draw of its own, since a
    toolkit does not say which images it asks about. report: called with the draws of each call.

    probabilities: give softmax of the logits instead, for attacks that insist. rows: rows evaluated so far. nonfinite
    (count,) bool: images with a logit or gradient that is not finite, seen in the calls with all images.
    """

    def __init__(
        self, target: Any, count: int, like: Tensor, seed: int, eot: int = 1,
        report: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(nn.Identity(), eot)
        self._target = (target,)  # in a tuple, so that it is not registered as a submodule
        self._dtype, self._device, self._seed, self._calls = like.dtype, like.device, seed, 0
        self._report = report
        self.rows, self.probabilities = 0, False
        self.nonfinite = torch.zeros(count, dtype=torch.bool, device=like.device)

    @property
    def device(self) -> torch.device:
        """Where the images are."""
        return self._device

    @property
    def target(self) -> Any:
        """The model under attack."""
        return self._target[0]

    def _draw(self, images: Tensor) -> Tensor:
        low, high = self.target.bounds
        x = images.to(self._device, self._dtype)
        # Straight-through: a zero gradient at the edge of the box would stop an attack that may still turn back.
        x = torch.nan_to_num(x, HALF)
        x = x.detach().clamp(0, 1) + (x - x.detach())
        ids = torch.arange(len(x), device=x.device)
        logits: Tensor = self.target.draw(
            low + (high - low) * x, ids, torch.full_like(ids, self._calls), "attack", self._seed
        )
        self._calls += 1
        self.rows += len(x)
        if self._report is not None:
            self._report(len(x))
        if len(x) == len(self.nonfinite):
            self.nonfinite |= ~torch.isfinite(logits.detach()).all(1).to(self._device)
            if x.requires_grad:
                x.register_hook(self._see_gradient)
        return logits.softmax(1) if self.probabilities else logits

    def _see_gradient(self, gradient: Tensor) -> None:
        self.nonfinite |= ~torch.isfinite(gradient).flatten(1).all(1)
