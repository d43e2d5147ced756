"""Predictions, losses, gradients and activations of a JEM for ART, in every form of images and labels it hands over."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from jem_robust.adapters.guard import Guarded, check_batch_size, edged
from jem_robust.gradients import quiet
from jem_robust.images import check_images, check_labels

Array = NDArray[Any]


class Inference:
    """What JEMARTClassifier puts before PyTorchClassifier; see there for images, labels and errors.

    Not in that class's own body because ART 1.20.1's InputFilter wraps a `predict` it finds there in np.array, which
    warns for the tensors that ProjectedGradientDescentPyTorch passes (numpy 2) and fails for those with a gradient.
    """

    eot: int
    nb_classes: int
    device: torch.device
    clip_values: Any
    all_framework_preprocessing: bool
    _model: Any
    _loss: Any
    _layer_names: list[str]
    _apply_preprocessing: Callable[..., Any]
    _apply_preprocessing_gradient: Callable[..., Any]
    _apply_postprocessing: Callable[..., Any]
    reduce_labels: Callable[..., Any]

    def predict(self, x: Any, batch_size: int = 128, training_mode: bool = False, **kwargs: Any) -> Array:
        """Logits (N, K) float32 of one fresh draw.

        batch_size: changes nothing, since the model splits large batches itself and keeps each image's noise.
        """
        check_batch_size(batch_size)
        prepared, _ = self._apply_preprocessing(as_array(self._entering(x)), y=None, fit=False)
        with torch.no_grad():
            logits = self._model(torch.as_tensor(prepared).to(self.device))[-1]
        predictions: Array = self._apply_postprocessing(preds=_float_array(logits), fit=False)
        return predictions

    def _entering(self, x: Any) -> Tensor:
        """x as a tensor of the caller's own, cut off at the box where an ART attack overshoots it."""
        images = x if isinstance(x, Tensor) else torch.as_tensor(np.array(x))  # copied: torch takes no reversed arrays
        # What our own evaluation attacks sees to the box itself.
        return images if isinstance(self._model.model, Guarded) else edged(images, self.clip_values)

    def loss_gradient(self, x: Any, y: Any, training_mode: bool = False, **kwargs: Any) -> Any:
        """Gradient of the batch's loss by the images (N, C, H, W), mean over eot: tensor for a tensor, else array."""

        def scalar(logits: Tensor) -> list[Tensor]:
            # In float64: float32 rounds the weight of a label predicted with confidence, softmax - 1, to 0.
            loss = self._loss_in(torch.float64)
            return [loss(logits.double(), self._targets(y, len(logits), torch.float64))]

        return self._gradients(x, scalar)[:, 0]

    def class_gradient(self, x: Any, label: Any = None, training_mode: bool = False, **kwargs: Any) -> Any:
        """Gradients of logits by the images, mean over eot: (N, K, C, H, W), or (N, 1, C, H, W) if label says which.

        label: None for all classes, one class for all images, or one class an image.
        """
        count = len(x)
        if label is None:
            return self._gradients(x, lambda logits: [logits[:, k].sum() for k in range(self.nb_classes)])
        given = as_array(label)
        wanted = check_labels(np.full(count, given) if given.ndim == 0 else given, count, self.nb_classes)
        return self._gradients(x, lambda logits: [logits.gather(1, wanted.to(logits.device).unsqueeze(1)).sum()])

    def _gradients(self, x: Any, scalars: Callable[[Tensor], list[Tensor]]) -> Any:
        """(N, number of scalars, C, H, W) float32: gradients of scalars of the logits by x, averaged over eot draws."""
        direct = self.all_framework_preprocessing  # autograd passes through; otherwise ART pulls the gradient back
        with torch.inference_mode(False), torch.enable_grad():
            start = self._entering(x).detach().clone()
            draws = [self._one_gradient(start, scalars, direct) for _ in range(self.eot)]
            mean = torch.stack(draws).mean(0)
        if not direct:
            pulled = self._apply_preprocessing_gradient(as_array(start), as_array(mean))
            mean = torch.as_tensor(np.asarray(pulled, np.float32))
        return mean.to(x.device) if isinstance(x, Tensor) else as_array(mean)

    def _one_gradient(self, start: Tensor, scalars: Callable[[Tensor], list[Tensor]], direct: bool) -> Tensor:
        images = start if direct else torch.as_tensor(self._apply_preprocessing(as_array(start), y=None, fit=False)[0])
        leaf = images.to(self.device).detach().requires_grad_()
        entering = self._apply_preprocessing(leaf, y=None, fit=False, no_grad=False)[0] if direct else leaf
        values = scalars(self._model(entering)[-1])
        last = len(values) - 1
        parts = [torch.autograd.grad(v, leaf, retain_graph=i < last)[0] for i, v in enumerate(values)]
        return torch.stack(parts, 1).float()

    def _targets(self, y: Any, count: int, dtype: torch.dtype) -> Tensor:
        """Labels in the form that the loss takes. ART 1.20.1's loss_gradient raises IndexError for integers (N,)."""
        if y is None:
            raise ValueError("expected labels, got None: pass the true classes")
        hot = nn.functional.one_hot(check_labels(y, count, self.nb_classes), self.nb_classes).to(self.device)
        targets: Tensor = self.reduce_labels(hot)
        return targets.to(dtype) if targets.is_floating_point() else targets

    def compute_loss(self, x: Any, y: Any, reduction: str = "none", **kwargs: Any) -> Any:
        """Loss of one fresh draw: (N,) for reduction "none", a scalar for "mean" and "sum"; tensors keep a graph."""
        as_tensor = isinstance(x, Tensor)
        entering = self._entering(x) if as_tensor else as_array(self._entering(x))
        prepared, _ = self._apply_preprocessing(entering, None, fit=False, no_grad=not as_tensor)
        with torch.set_grad_enabled(as_tensor and torch.is_grad_enabled()):
            logits = self._model(torch.as_tensor(prepared).to(self.device))[-1]
            loss = self._loss_in(logits.dtype, reduction)(logits, self._targets(y, len(logits), logits.dtype))
        return loss if as_tensor else _float_array(loss)

    def _loss_in(self, dtype: torch.dtype, reduction: str | None = None) -> Any:
        """A copy of the loss whose own tensors, such as class weights, have this type."""
        loss = deepcopy(self._loss)
        if isinstance(loss, nn.Module):
            loss.to(self.device, dtype)
        if reduction is not None:
            loss.reduction = reduction
        return loss

    def get_activations(
        self, x: Any, layer: int | str | None = None, batch_size: int = 128, framework: bool = False
    ) -> Any:
        """A layer's output in the network's forward on the refined images, mean over chains: (N, ...).

        layer: one of layer_names or its position. framework: return a tensor with its graph. ART 1.20.1 registers a
        forward hook a call and never removes it; this one is removed. batch_size: images a forward; the noise is the
        same whatever it is.
        """
        size = check_batch_size(batch_size)
        names = self._layer_names
        name = layer if isinstance(layer, str) else names[layer] if isinstance(layer, int) else None
        if name is None or name not in names:
            raise ValueError(f"expected a layer out of {names} or its position, got {layer!r}")
        entering = self._entering(x) if isinstance(x, Tensor) else as_array(self._entering(x))
        prepared, _ = self._apply_preprocessing(entering, None, fit=False, no_grad=not framework)
        images = check_images(torch.as_tensor(prepared)).to(self.device)
        with torch.set_grad_enabled(framework and torch.is_grad_enabled()):
            refined = self._model.model.refine(images)
            outputs = torch.cat([self._layer_output(part, name) for part in refined.split(size)])
        return outputs if framework else _float_array(outputs)

    def _layer_output(self, refined: Tensor, name: str) -> Tensor:
        model, seen = self._model.model, list[Any]()
        low, high = model.input_range
        rows = low + (high - low) * refined
        handle = model.network.get_submodule(name).register_forward_hook(lambda m, i, output: seen.append(output))
        try:
            with quiet(model.network):
                model.network(rows.flatten(0, 1))
        finally:
            handle.remove()
        output = seen[-1] if seen else None
        if not isinstance(output, Tensor):
            raise ValueError(f"expected the layer {name} to return a tensor in the forward: pick another layer")
        return output.reshape(*rows.shape[:2], *output.shape[1:]).mean(1)


def as_array(x: Any) -> Array:
    """A tensor's or array's numbers as an array."""
    return x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)


def _float_array(x: Tensor) -> Array:
    return as_array(x.float())
