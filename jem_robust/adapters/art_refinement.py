"""SGLD refinement as an ART preprocessing defence, in front of anybody's classifier (Hill et al. 2021; MEFA)."""

from typing import Any

import torch
from torch import Tensor, nn

from jem_robust.adapters.guard import missing
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

    model: a JEMClassifier (its refinement and noise stream, one chain), or any module with a scalar log p(x), (N,), of
    images in `input_range`, with `refinement` saying how to run it. gradient: "exact" differentiates the chain,
    "straight-through" takes its Jacobian for the identity (BPDA), in forward and estimate_gradient alike; by default
    the model's. clip: clip the refined images to [0, 1] (otherwise only where the refinement clamps).

    Images (N, C, H, W) in [0, 1] in and out, in the model's dtype. The model is held, not copied, and the device
    follows it. Raises TypeError and ValueError for settings that make no sense.
    """

    params = ["gradient", "clip"]  # noqa: RUF012  # ART's own declaration

    def __init__(
        self, model: nn.Module, refinement: Refinement | None = None, input_range: tuple[float, float] = (-1.0, 1.0),
        gradient: str | None = None, clip: bool = False, apply_fit: bool = False, apply_predict: bool = True,
        seed: int = 0,
    ) -> None:  # fmt: skip
        if gradient is not None and gradient not in GRADIENTS:
            raise ValueError(f"expected gradient out of {GRADIENTS}, got {gradient!r}")
        if isinstance(model, JEMClassifier):
            if refinement is not None:
                raise ValueError("expected no refinement beside a JEMClassifier: use model.with_refinement(...)")
            self.model = model
        elif isinstance(model, nn.Module):
            self.model = JEMClassifier(_EnergyAsLogits(model), refinement, input_range, gradient="exact", seed=seed)
        else:
            raise TypeError(f"expected a JEMClassifier or a module with log p(x), got {type(model).__name__}")
        self.gradient, self.clip = gradient or self.model.gradient, clip
        super().__init__(is_fitted=True, apply_fit=apply_fit, apply_predict=apply_predict)
        self._chain = self.model.with_refinement(chains=1).with_gradient(self.gradient)

    @property
    def _device(self) -> torch.device:
        return self.model.device

    @_device.setter
    def _device(self, device: torch.device) -> None:
        """ART sets it once, at construction; it follows the model instead."""

    def reseed(self, seed: int) -> "SGLDRefinement":
        """Restart the noise stream."""
        self._chain.reseed(seed)
        return self

    def forward(self, x: Tensor, y: Any = None) -> tuple[Tensor, Any]:
        """Refined images with fresh noise, differentiable in x; y is handed through."""
        refined = self._chain.refine(x).squeeze(1)
        return (refined.clamp(0, 1) if self.clip else refined), y

    def estimate_gradient(self, x: Any, grad: Any) -> Any:
        """grad (N, C, H, W) or (N, K, C, H, W) pulled back through the refinement: unchanged if straight-through."""
        return grad if self.gradient == "straight-through" else super().estimate_gradient(x, grad)
