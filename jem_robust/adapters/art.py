"""ART: a JEM as an ART classifier, and SGLD refinement as an ART defence. Written against ART 1.20.1."""

from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from jem_robust.adapters.art_inference import Inference
from jem_robust.adapters.guard import Guarded, check_eot, check_model, missing

try:
    from art.estimators.classification import PyTorchClassifier
except ImportError as error:
    raise missing("the Adversarial Robustness Toolbox", "pip install jem-robust[art]", error) from error

from jem_robust.adapters.art_fitting import fit_network
from jem_robust.adapters.art_refinement import SGLDRefinement

__all__ = ["JEMARTClassifier", "SGLDRefinement"]


class _Outputs(Guarded):
    """What ART wraps a module in: a list with the outputs, and the names of the layers."""

    def forward(self, images: Tensor) -> list[Tensor]:  # type: ignore[override]
        return [super().forward(images)]

    @property
    def get_layers(self) -> list[str]:
        network: nn.Module = getattr(self.model, "network", self.model)
        return [name for name, _ in network.named_modules() if name]


class JEMARTClassifier(Inference, PyTorchClassifier):  # type: ignore[misc]
    """An ART classifier around a JEMClassifier, whose attacks differentiate the refinement as the model says.

    model: held itself, no copy, so `.model` is it and the device follows it. loss: cross-entropy by default; its labels
    are the classes. input_shape (C, H, W), nb_classes: from the model where it knows them, else to be given (classes
    are counted by one unrefined forward). eot: draws averaged in loss_gradient and class_gradient. Other keywords are
    PyTorchClassifier's; device_type and training modes are ignored, `optimizer` is only kept (see fit).

    Arrays or tensors (N, C, H, W) in [0, 1], float16 to float64, give float32. Labels: integers (N,), (N, 1) or
    one-hot. Every prediction draws fresh noise from the model's plain stream. Parameter gradients and training flags
    stay as they are. Raises TypeError for another model, ValueError for images, labels or settings out of range.

    ART 1.20.1 rebuilds AutoProjectedGradientDescent and AutoAttack with a `loss_type` around `.model` in a plain
    PyTorchClassifier of its own, without eot and without these guards: leave loss_type out and pass `loss` here.
    """

    def __init__(
        self, model: nn.Module, loss: nn.Module | None = None, input_shape: tuple[int, ...] | None = None,
        nb_classes: int | None = None, *, eot: int = 1, channels_first: bool = True,
        clip_values: Any = (0.0, 1.0), preprocessing: Any = None, **settings: Any,
    ) -> None:  # fmt: skip
        if isinstance(model, Guarded):  # what our own evaluation attacks
            check_eot(eot)
        else:
            check_model(model, eot)
        if not channels_first:
            raise ValueError("expected channels_first=True, got False: move the channels to axis 1, (N, C, H, W)")
        shape = input_shape or getattr(model, "input_shape", None)
        if shape is None:
            raise ValueError("expected input_shape, which this model does not know: pass it, e.g. (1, 28, 28)")
        self.eot = eot
        classes = nb_classes or getattr(model, "num_classes", None) or _count_classes(model, tuple(shape))
        settings.pop("device_type", None)
        super().__init__(
            model=model, loss=loss or nn.CrossEntropyLoss(), input_shape=tuple(shape), nb_classes=int(classes),
            clip_values=clip_values, preprocessing=preprocessing, channels_first=True, **settings,
        )  # fmt: skip

    def _make_model_wrapper(self, model: nn.Module) -> _Outputs:
        return _Outputs(model)

    @property
    def model(self) -> Any:
        """The JEMClassifier itself."""
        return self._model.model

    @property
    def _device(self) -> torch.device:
        return self._model.device  # type: ignore[no-any-return]

    @_device.setter
    def _device(self, device: torch.device) -> None:
        """ART sets it once, at construction; it follows the model instead."""

    def fit(self, x: Any, y: Any, batch_size: int = 128, nb_epochs: int = 10, **kwargs: Any) -> None:
        """Train the model's network with our trainer (not ART's loop, which would need a graph to the parameters).

        nb_epochs passes over x; keywords: settings=TrainingSettings(...) decides everything else, out=folder keeps the
        checkpoints, verbose shows progress. Raises DivergenceError; gradients and training flags are as before.
        """
        images, labels = self._apply_preprocessing(np.asarray(x, np.float32), np.asarray(y), fit=True)
        fit_network(self.model, images, labels, batch_size, nb_epochs, **kwargs)

    def fit_generator(self, generator: Any, nb_epochs: int = 20, verbose: bool = False, **kwargs: Any) -> None:
        """Fit on one pass over an ART data generator's batches."""
        batches = [generator.get_batch() for _ in range(max(1, -(-generator.size // generator.batch_size)))]
        images, labels = (np.concatenate([np.asarray(part) for part in parts]) for parts in zip(*batches, strict=True))
        self.fit(images, labels, generator.batch_size, nb_epochs, verbose=verbose, **kwargs)

    def clone_for_refitting(self) -> "JEMARTClassifier":
        """A classifier around a copy of the model whose layers are initialised afresh."""
        model = deepcopy(self.model)
        for module in model.modules():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
        return JEMARTClassifier(model, deepcopy(self._loss), self.input_shape, self.nb_classes, eot=self.eot)

    def __getstate__(self) -> dict[str, Any]:
        """Everything; ART's own writes the weights to a file in the home directory."""
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _count_classes(model: Any, shape: tuple[int, ...]) -> int:
    probed = model.with_refinement(steps=0) if hasattr(model, "with_refinement") else model
    with torch.no_grad():
        return int(probed(torch.full((1, *shape), 0.5, device=model.device)).shape[1])
