"""SGLD refinement as an ART preprocessing defence, in front of anybody's classifier (Hill et al. 2021; MEFA)."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from jem_robust.adapters.guard import edged, missing
from jem_robust.classifier import JEMClassifier
from jem_robust.gradients import GRADIENTS
from jem_robust.langevin import Refinement

try:
    from art.defences.preprocessor.preprocessor import PreprocessorPyTorch
except ImportError as error:
    raise missing("the Adversarial Robustness Toolbox", "pip install jem-robust[art]", error) from error


class _EnergyAsLogits(nn.Module):
    """log p(x) (N,) or (N, 1) as one logit, whose logsumexp it is again."""

    def __init__(self, energy: nn.Module) -> None:
        super().__init__()
        self.energy = energy

    def forward(self, x: Tensor) -> Tensor:
        return self.energy(x).reshape(len(x), 1)  # type: ignore[no-any-return]


class SGLDRefinement(PreprocessorPyTorch):  # type: ignore[misc]
    """Runs one SGLD chain on every image before the classifier sees it; works in any ART PyTorchClassifier.

    model: a JEMClassifier (its refinement, one chain), or any module with a scalar log p(x), (N,), of images in
    `input_range`, with `refinement` saying how to run it. gradient: "exact" differentiates the chain,
    "straight-through" takes its Jacobian for the identity (BPDA), in forward and estimate_gradient alike; by default
    the model's. clip: clip the refined images to [0, 1] (otherwise only where the refinement clamps).

    The noise is the next of the JEMClassifier's own plain stream, which moves on; with `seed`, and for other modules
    (0 by default), that of a stream of the defence's own. Within model.frozen_noise it is that noise.

    Images (N, C, H, W) in [0, 1] in and out, in the model's dtype; beyond that ART's attacks see the edge of the box
    (guard.edged). The model is held, not copied, and the device follows it. Raises TypeError and ValueError for
    settings that make no sense.
    """

    params = ["gradient", "clip"]  # noqa: RUF012  # ART's own declaration

    def __init__(
        self, model: nn.Module, refinement: Refinement | None = None, input_range: tuple[float, float] = (-1.0, 1.0),
        gradient: str | None = None, clip: bool = False, apply_fit: bool = False, apply_predict: bool = True,
        seed: int | None = None,
    ) -> None:  # fmt: skip
        if isinstance(model, JEMClassifier):
            if refinement is not None:
                raise ValueError("expected no refinement beside a JEMClassifier: use model.with_refinement(...)")
            self.model = model
        elif isinstance(model, nn.Module):
            self.model = JEMClassifier(_EnergyAsLogits(model), refinement, input_range, seed=seed or 0)
        else:
            raise TypeError(f"expected a JEMClassifier or a module with log p(x), got {type(model).__name__}")
        super().__init__(is_fitted=True, apply_fit=apply_fit, apply_predict=apply_predict)
        self._stream = self.model if seed is None else self.model.with_refinement(chains=1).reseed(seed)
        self._set(self.model.gradient if gradient is None else gradient, clip)

    def _set(self, gradient: str, clip: bool) -> None:
        if gradient not in GRADIENTS:
            raise ValueError(f"expected gradient out of {GRADIENTS}, got {gradient!r}: pass one of them")
        if not isinstance(clip, bool):
            raise ValueError(f"expected clip to be True or False, got {clip!r}: pass one of them")
        self.gradient, self.clip = gradient, clip
        self._chain = self.model.with_refinement(chains=1).with_gradient(gradient)
        self._chain._frozen = self.model._frozen  # the very list: the model's frozen noise is the view's, too

    def set_params(self, **kwargs: Any) -> None:
        """Set gradient or clip. Raises ValueError for others, which ART's own passes over, and for their values."""
        if unknown := sorted(set(kwargs) - set(self.params)):
            raise ValueError(f"expected parameters out of {self.params}, got {unknown}: make another SGLDRefinement")
        self._set(**{"gradient": self.gradient, "clip": self.clip, **kwargs})

    @property
    def _device(self) -> torch.device:
        return self.model.device

    @_device.setter
    def _device(self, device: torch.device) -> None:
        """ART sets it once, at construction; it follows the model instead."""

    def reseed(self, seed: int) -> "SGLDRefinement":
        """Restart the noise stream: the model's, unless a seed was given for the defence's own."""
        self._stream.reseed(seed)
        return self

    def __call__(self, x: Any, y: Any = None) -> tuple[Any, Any]:
        """Refined images as an array, without gradient; y is handed through."""
        return super().__call__(np.ascontiguousarray(x), y)  # type: ignore[no-any-return]

    def forward(self, x: Tensor, y: Any = None) -> tuple[Tensor, Any]:
        """Refined images with fresh noise, differentiable in x; y is handed through."""
        chain, stream = self._chain, self._stream
        chain.seed, chain._position = stream.seed, stream._position
        refined = chain.refine(edged(x)).squeeze(1)
        stream._position = chain._position
        return (refined.clamp(0, 1) if self.clip else refined), y

    def estimate_gradient(self, x: Any, grad: Any) -> Any:
        """grad (N, C, H, W) or (N, K, C, H, W) pulled back through the refinement: unchanged if straight-through."""
        return grad if self.gradient == "straight-through" else super().estimate_gradient(x, grad)
