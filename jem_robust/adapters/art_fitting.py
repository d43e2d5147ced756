"""Training a model's network from arrays by our trainer, for ART's `fit`."""

from dataclasses import replace
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from jem_robust.adapters.isolation import isolated
from jem_robust.classifier import JEMClassifier
from jem_robust.images import check_images, check_labels
from jem_robust.langevin import Refinement
from jem_robust.training.trainer import Trainer, TrainingSettings

VALIDATION_SHARE = 10
VALIDATION_CAP = 5000


def fit_network(
    model: JEMClassifier, images: Any, labels: Any, batch_size: int, epochs: int, *, settings: Any = None,
    out: str | Path | None = None, verbose: bool = False, **ignored: Any,
) -> None:  # fmt: skip
    """Train model.network in place on images (N, C, H, W) in [0, 1] and labels in any form, `epochs` passes.

    settings: a TrainingSettings, whose iterations then count; by default the jem objective with the model's own chain.
    A tenth of the images is held back for validation. What the caller had in parameters' gradients, flags and global
    random numbers is the same afterwards. Raises ValueError for settings of another type or fewer than 2 images.
    """
    x = check_images(images, model.input_shape).float().cpu()
    y = check_labels(labels, len(x), model.num_classes).cpu()
    if settings is None:
        settings = _settings(model, len(x), batch_size, epochs)
    if not isinstance(settings, TrainingSettings):
        raise TypeError(f"expected settings to be a TrainingSettings, got {type(settings).__name__}")
    parameters = list(model.network.parameters())
    before = [p.grad for p in parameters]
    flags = [(m, m.training) for m in model.network.modules()]
    for p in parameters:
        p.grad = None  # the trainer's first zero_grad must not reach the caller's tensors
    try:
        with TemporaryDirectory() as scratch, isolated(settings.seed), torch.inference_mode(False), torch.enable_grad():
            Trainer(model.network, x, y, settings, out or scratch, dict(model.card), show=bool(verbose)).fit()
    finally:
        for p, gradient in zip(parameters, before, strict=True):
            p.grad = gradient
        for m, training in flags:
            m.training = training


def _settings(model: JEMClassifier, count: int, batch_size: int, epochs: int) -> TrainingSettings:
    if count < 2:
        raise ValueError(f"expected at least 2 images, one to train on and one for validation, got {count}")
    held = int(np.clip(count // VALIDATION_SHARE, 1, VALIDATION_CAP))
    iterations = max(1, epochs * ceil((count - held) / batch_size))
    own = model.refinement
    sampler = replace(own, chains=1, init_noise=0.0) if own.steps else Refinement(10, 1.0, 0.01, chains=1, clamp=True)
    return TrainingSettings(
        iterations=iterations, batch_size=batch_size, warmup=min(500, iterations // 10), sampler=sampler,
        input_range=model.input_range, validation_images=held, validate_every=iterations, starts="uniform",
        buffer_size=min(10_000, count), precision="float32",
    )  # fmt: skip
