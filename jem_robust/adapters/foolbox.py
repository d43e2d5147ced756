"""Foolbox: a JEM as a foolbox.PyTorchModel. Written against Foolbox 3.3.4."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from jem_robust.adapters.guard import Guarded, check_model, missing
from jem_robust.adapters.isolation import argument_of
from jem_robust.images import TOLERANCE, check_images

try:
    with warnings.catch_warnings():
        # Foolbox 3.3.4, attacks/blur.py: imports from scipy.ndimage.filters, a namespace SciPy is about to remove.
        warnings.filterwarnings("ignore", message="Please import `gaussian_filter`", category=DeprecationWarning)
        from foolbox.attacks.base import verify_input_bounds
        from foolbox.models.pytorch import PyTorchModel
        from foolbox.types import Bounds
except ImportError as error:
    raise missing("Foolbox", "pip install jem-robust[foolbox]", error) from error

_Base: Any = PyTorchModel  # typed in some installations and not in others


class _FoolboxModule(Guarded):
    def forward(self, images: Tensor) -> Tensor:
        # Foolbox 3.3.4's BoundaryAttack divides by a distance that is 0 for images wrong from the start, and hands over
        # NaN for them at every step; these rows must not end the attack on the others.
        broken = images.detach().isnan().flatten(1).any(1)
        if not bool(broken.any()) or bool(broken.all()):
            return super().forward(images)
        logits = super().forward(torch.where(broken.view(-1, *[1] * (images.dim() - 1)), 0.5, images))
        return torch.where(broken.unsqueeze(1), torch.nan, logits)


class FoolboxModel(_Base):  # type: ignore[misc]
    """A foolbox.PyTorchModel around a guarded module with images in [0, 1], on the device the module is on now."""

    def __init__(self, module: Guarded) -> None:
        # Without a device Foolbox 3.3.4 moves the model to cuda:0 where there is one.
        super().__init__(module, bounds=(0.0, 1.0), device=module.device)

    @property
    def bounds(self) -> Any:
        """(0, 1). Every attack asks for them first: ValueError for images that it cannot be run on.

        Foolbox 3.3.4 checks the range by bare asserts. eagerpy 0.30.0 differentiates a clone of the images, which is no
        leaf where they require a gradient: some attacks then add to the caller's .grad, others fail without a word.
        """
        images = argument_of(verify_input_bounds, "input")
        if images is None:
            return self._bounds
        check_images(images.raw)
        if images.raw.requires_grad:
            raise ValueError("expected images that require no gradient, got some that do: pass images.detach()")
        return Bounds(self._bounds.lower - TOLERANCE, self._bounds.upper + TOLERANCE)


def to_foolbox(model: nn.Module, eot: int = 1) -> FoolboxModel:
    """The model for Foolbox's attacks: fresh noise from its plain stream in every call; flags and gradients untouched.

    model: a JEMClassifier, held itself. eot: draws whose logits, not whose gradients, are averaged where Foolbox asks
    for a gradient, since it applies its loss to what it is handed (JEMARTClassifier computes the loss itself and
    averages gradients). What Foolbox judges success by stays a single draw an image, so judge with jr.evaluate.
    Raises TypeError for another model, ValueError for eot; attacks raise ValueError for images out of [0, 1] or that
    require a gradient.
    """
    check_model(model, eot)
    return FoolboxModel(_FoolboxModule(model, eot))
