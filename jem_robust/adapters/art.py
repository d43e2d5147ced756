"""ART: a JEM as an ART classifier, and SGLD refinement as an ART defence. Written against ART 1.20.1."""

from copy import deepcopy
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from jem_robust.adapters.art_inference import Inference, as_array
from jem_robust.adapters.guard import TOLERANCE, Guarded, Hidden, asked_by, check_eot, check_model, missing

try:
    from art.estimators.classification import PyTorchClassifier
except ImportError as error:
    raise missing("the Adversarial Robustness Toolbox", "pip install jem-robust[art]", error) from error

from jem_robust.adapters.art_fitting import fit_network
from jem_robust.adapters.art_refinement import SGLDRefinement

__all__ = ["JEMARTClassifier", "SGLDRefinement"]


FIT_KEYWORDS = {"settings", "out", "verbose"}


class _Outputs(Guarded):
    """What ART wraps a module in: a list with the outputs, and the names of the layers."""

    def forward(self, images: Tensor) -> list[Tensor]:  # type: ignore[override]
        return [super().forward(images)]

    @property
    def _model(self) -> nn.Module:
        """What ART calls the wrapped module, e.g. in save."""
        return self.model

    @property
    def get_layers(self) -> list[str]:
        network: nn.Module = getattr(self.model, "network", self.model)
        return [name for name, _ in network.named_modules() if name]


class JEMARTClassifier(Inference, PyTorchClassifier):  # type: ignore[misc]
    """An ART classifier around a JEMClassifier, whose attacks differentiate the refinement as the model says.

    model: held itself, no copy, so `.model` is it and the device follows it. loss: cross-entropy by default; its labels
    are the classes. input_shape (C, H, W), nb_classes: from the model where it knows them, else to be given (classes
    are counted by one unrefined forward). eot: draws averaged in loss_gradient and class_gradient. clip_values: in
    [0, 1] after `preprocessing`. Other keywords are PyTorchClassifier's; device_type and training modes are ignored,
    `optimizer` is only kept (see fit).

    Arrays or tensors (N, C, H, W) in [0, 1], float16 to float64, give float32. Labels: integers (N,), (N, 1) or
    one-hot. Every prediction draws fresh noise from the model's plain stream. Parameter gradients and training flags
    stay as they are. Raises TypeError for another model, ValueError for images, labels or settings out of range; where
    ART's attacks themselves look beyond clip_values, they see the edge (guard.edged).

    ART 1.20.1 rebuilds AutoProjectedGradientDescent and AutoAttack with a `loss_type` around `.model` in a plain
    PyTorchClassifier of its own, without eot. Its attacks get a guarded module there; leave loss_type out and pass
    `loss` here for eot.
    """

    estimator_params = [*PyTorchClassifier.estimator_params, "eot"]  # noqa: RUF012  # ART's own declaration

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
        shape = _agreed("input_shape", _whole(input_shape), getattr(model, "input_shape", None))
        if shape is None:
            raise ValueError("expected input_shape, which this model does not know: pass it, e.g. (1, 28, 28)")
        classes = getattr(model, "num_classes", None)
        if classes is None and not (isinstance(model, Guarded) and nb_classes):  # its draws are counted
            classes = _count_classes(model, shape)
        classes = _agreed("nb_classes", nb_classes, classes)
        _check_clip_values(clip_values, preprocessing)
        self.eot = eot
        settings.pop("device_type", None)
        super().__init__(
            model=model, loss=loss or nn.CrossEntropyLoss(), input_shape=shape, nb_classes=int(classes),
            clip_values=clip_values, preprocessing=preprocessing, channels_first=True, **settings,
        )  # fmt: skip

    def _make_model_wrapper(self, model: nn.Module) -> _Outputs:
        return _Outputs(model)

    @property
    def model(self) -> Any:
        """The JEMClassifier itself; for ART's attacks, which train() it and clear its gradients, one that hides it."""
        held = self._model.model
        return Hidden(held) if asked_by("art.attacks.") and not isinstance(held, Guarded) else held

    @property
    def _device(self) -> torch.device:
        return self._model.device  # type: ignore[no-any-return]

    @_device.setter
    def _device(self, device: torch.device) -> None:
        """ART sets it once, at construction; it follows the model instead."""

    def set_params(self, **kwargs: Any) -> None:
        """Set what the constructor takes, with its checks: all of it or, on an error, nothing.

        ART 1.20.1's own puts the bare model in the place of its wrapper and keeps the old loss's form of labels.
        """
        if unknown := sorted(set(kwargs) - set(self.estimator_params)):
            raise ValueError(f"expected parameters out of {self.estimator_params}, got {unknown}: fix the names")
        self.__dict__.update(self._with(**kwargs).__dict__)

    def _with(self, **changes: Any) -> "JEMARTClassifier":
        return JEMARTClassifier(**{**self.get_params(), **changes})

    def fit(
        self, x: Any, y: Any, batch_size: int = 128, nb_epochs: int = 10, training_mode: bool = True, **kwargs: Any
    ) -> None:
        """Train the model's network with our trainer (not ART's loop, which would need a graph to the parameters).

        nb_epochs passes over x; keywords: settings=TrainingSettings(...) decides everything else, out=folder keeps the
        checkpoints, verbose shows progress. Raises DivergenceError, TypeError for other keywords; gradients and
        training flags are as before.
        """
        if unknown := sorted(set(kwargs) - FIT_KEYWORDS):
            raise TypeError(
                f"expected keywords out of {sorted(FIT_KEYWORDS)}, got {unknown}: "
                "settings=TrainingSettings(...) says everything else"
            )
        images, labels = self._apply_preprocessing(np.array(as_array(x)), np.array(as_array(y)), fit=True)
        fit_network(self._model.model, images, labels, batch_size, nb_epochs, **kwargs)

    def fit_generator(self, generator: Any, nb_epochs: int = 20, verbose: bool = False, **kwargs: Any) -> None:
        """Fit on one pass over an ART data generator's batches."""
        batches = [generator.get_batch() for _ in range(max(1, -(-generator.size // generator.batch_size)))]
        images, labels = (np.concatenate([np.asarray(part) for part in parts]) for parts in zip(*batches, strict=True))
        self.fit(images, labels, generator.batch_size, nb_epochs, verbose=verbose, **kwargs)

    def clone_for_refitting(self) -> "JEMARTClassifier":
        """A classifier around a copy of the model whose layers are initialised afresh."""
        model = deepcopy(self._model.model)
        for module in model.modules():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
        return self._with(model=model, loss=deepcopy(self._loss))

    def __getstate__(self) -> dict[str, Any]:
        """Everything; ART's own writes the weights to a file in the home directory."""
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _whole(shape: Any) -> tuple[int, ...] | None:
    if shape is None:
        return None
    try:
        return tuple(index(size) for size in shape)
    except TypeError as error:
        raise ValueError(f"expected input_shape (C, H, W), got {shape!r}: pass whole numbers") from error


def _agreed(name: str, given: Any, known: Any) -> Any:
    """What was given or the model knows, which may not differ."""
    if given is not None and known is not None and given != known:
        raise ValueError(f"expected {name}={known}, as the model has it, got {given}: leave it out")
    return known if given is None else given


def _count_classes(model: Any, shape: tuple[int, ...]) -> int:
    probed = model.with_refinement(steps=0) if hasattr(model, "with_refinement") else model
    try:
        with torch.no_grad():
            return int(probed(torch.full((1, *shape), 0.5, device=model.device)).shape[1])
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"expected input_shape to fit the network, got {shape} ({error}): pass (C, H, W)") from error


def _check_clip_values(clip_values: Any, preprocessing: Any) -> None:
    """ValueError unless images within clip_values are in [0, 1] after preprocessing by a mean and a divisor."""
    if not isinstance(preprocessing, tuple):
        preprocessing = getattr(preprocessing, "mean", 0.0), getattr(preprocessing, "std", 1.0)
    mean, std = (np.reshape(v, (-1, 1, 1)) if np.ndim(v) == 1 else v for v in preprocessing)  # 1-d: one a channel
    given = () if np.ndim(clip_values) == 0 else clip_values
    ends = [(np.asarray(end, float) - mean) / std for end in given]
    if len(ends) != 2 or np.min(ends) < -TOLERANCE or np.max(ends) > 1 + TOLERANCE:
        raise ValueError(
            f"expected clip_values within [0, 1] after preprocessing, got {clip_values}: leave them out for images in "
            "[0, 1], or pass e.g. clip_values=(0, 255) with preprocessing=(0, 255)"
        )
