"""What toolkits get to see of a model: modules that keep their side effects away from it.

Reasons, read from the toolkits' source: ART 1.20.1 switches training flags and wipes parameter gradients, torchattacks
3.5.1 calls train() on the whole model, Foolbox 3.3.4 asks for a model in eval mode and moves it to a GPU.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from functools import cache
from numbers import Integral
from typing import Any, Self

import torch
from torch import Tensor, nn

from jem_robust.classifier import JEMClassifier

HALF = 0.5
# Shares of the box by which an attack's search may leave it: UniversalPerturbation goes far, other units go further
# (-1 to 1, 0 to 255).
OVERSHOOT = 0.9
TOLERANCE = 1e-6  # as in images.py, which clamps what is nearer


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


def check_batch_size(batch_size: Any) -> int:
    """batch_size as an int; ValueError unless it is a whole number from 1 up."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, Integral) or batch_size < 1:
        raise ValueError(f"expected batch_size to be a whole number from 1 up, got {batch_size!r}: pass e.g. 128")
    return int(batch_size)


def asked_by(package: str) -> bool:
    """Whether the code that called our adapters belongs to a package, e.g. "art.attacks."."""
    frame = sys._getframe(1)
    while frame.f_back and str(frame.f_globals.get("__name__", "")).startswith(__package__ or ""):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).startswith(package)


def edged(images: Tensor, bounds: Any = (0.0, 1.0)) -> Tensor:
    """Images for a model that takes none beyond the bounds: what ART's search overshoots becomes the edge.

    ART 1.20.1's NewtonFool, ZooAttack (by its spline zoom) and UniversalPerturbation ask about points outside of
    clip_values and clip only what they return (ShadowAttack goes further than is told from other units, and is
    refused). So where ART is what asks, up to OVERSHOOT is cut off, the gradient
    passing through, and noted once in the log. Otherwise, or further out, images come back as they are, for the model
    to refuse.
    """
    if not images.is_floating_point() or images.numel() == 0 or not asked_by("art."):
        return images
    low, high = (torch.as_tensor(bound, dtype=images.dtype, device=images.device) for bound in bounds)
    inside = images.detach().clamp(low, high)
    beyond = float(((images.detach() - inside).abs() / (high - low)).max())
    if not TOLERANCE < beyond <= OVERSHOOT:
        return images
    note_once("an ART attack asked about images outside of [0, 1]: the model was asked about the edge of it instead")
    return inside + (images - images.detach())


@cache
def note_once(text: str) -> None:
    """Log a warning, as ART does with its own, once a process."""
    logging.getLogger(__name__).warning(text)


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


class Hidden(Guarded):
    """Guarded for code that finds parameters and flags through its submodules: it has none of the model's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(nn.Identity())
        self._hidden = (model,)  # in a tuple, so that it is not registered as a submodule

    def _draw(self, images: Tensor) -> Tensor:
        logits: Tensor = self._hidden[0](images)
        return logits

    @property
    def device(self) -> torch.device:
        """Where the model is now."""
        device: torch.device = self._hidden[0].device  # type: ignore[assignment]
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
