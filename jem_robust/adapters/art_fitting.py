"""Training a model's network from arrays by our trainer, for ART's `fit`."""

from dataclasses import replace
from math import ceil
from numbers import Integral
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from jem_robust.adapters.guard import check_batch_size
from jem_robust.adapters.isolation import isolated
from jem_robust.classifier import JEMClassifier
from jem_robust.images import check_images, check_labels
from jem_robust.langevin import Refinement
from jem_robust.training.trainer import Trainer, TrainingSettings

VALIDATION_SHARE = 10
VALIDATION_CAP = 5000


def fit_network(
    model: JEMClassifier, images: Any, labels: Any, batch_size: int, epochs: int, *, settings: Any = None,
    out: str | Path | None = None, verbose: bool = False,
) -> None:  # fmt: skip
    """Train model.network in place on images (N, C, H, W) in [0, 1] and labels in any form, `epochs` passes (0: none).

    settings: a TrainingSettings, whose iterations then count; by default the jem objective with the model's own chain.
    By default, too, a batch size above N means N, and a tenth of the images is held back for validation unless that
    leaves less than a batch, as in ART's adversarial trainers, which fit one batch a call: then the training images
    serve for both. What the caller had in parameters' gradients, flags and global random numbers is the same
    afterwards. Raises ValueError for images or numbers that cannot be trained on, TypeError for other settings.
    """
    x = check_images(images, model.input_shape).float().cpu()
    y = check_labels(labels, len(x), model.num_classes).cpu()
    batch_size = check_batch_size(batch_size)
    if isinstance(epochs, bool) or not isinstance(epochs, Integral) or epochs < 0:
        raise ValueError(f"expected nb_epochs to be a whole number from 0 up, got {epochs!r}: pass e.g. 10")
    if not isinstance(settings, TrainingSettings | None):
        raise TypeError(f"expected settings to be a TrainingSettings, got {type(settings).__name__}: make one")
    if len(x) == 0:
        raise ValueError("expected at least 1 image to train on, got 0: pass more")
    if epochs == 0:
        return
    if settings is None:
        settings, build = _settings(model, len(x), batch_size, int(epochs)), _trainer
    else:
        build = Trainer
    parameters = list(model.network.parameters())
    before = [p.grad for p in parameters]
    flags = [(m, m.training) for m in model.network.modules()]
    for p in parameters:
        p.grad = None  # the trainer's first zero_grad must not reach the caller's tensors
    try:
        with TemporaryDirectory() as scratch, isolated(settings.seed), torch.inference_mode(False), torch.enable_grad():
            build(model.network, x, y, settings, out or scratch, dict(model.card), bool(verbose)).fit()
    finally:
        for p, gradient in zip(parameters, before, strict=True):
            p.grad = gradient
        for m, training in flags:
            m.training = training


def _settings(model: JEMClassifier, count: int, batch_size: int, epochs: int) -> TrainingSettings:
    held = min(count // VALIDATION_SHARE, VALIDATION_CAP)
    if count - held < batch_size:
        held = 0
    iterations = epochs * ceil((count - held) / batch_size)
    own = model.refinement
    sampler = replace(own, chains=1, init_noise=0.0) if own.steps else Refinement(10, 1.0, 0.01, chains=1, clamp=True)
    return TrainingSettings(
        iterations=iterations, batch_size=min(batch_size, count), warmup=min(500, iterations // 10), sampler=sampler,
        input_range=model.input_range, validation_images=held or count, validate_every=iterations, starts="uniform",
        buffer_size=min(10_000, count), precision="float32",
    )  # fmt: skip


def _trainer(
    network: nn.Module, x: Tensor, y: Tensor, settings: TrainingSettings, out: str | Path, card: dict[str, Any],
    show: bool,
) -> Trainer:  # fmt: skip
    """A trainer that may validate on the images it trains on, and take batches that lack a class, as ART hands over.

    The trainer splits its images and refuses both, so it starts with blank ones and gets these afterwards.
    """
    held, low, high = settings.validation_images, *settings.input_range
    blank = x.new_zeros(held + settings.batch_size, *x.shape[1:])
    trainer = Trainer(network, blank, y.new_zeros(len(blank)), settings, out, card, show)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(settings.seed))
    tested, kept = order[:held], order[held:] if held < len(x) else order
    scaled = low + (high - low) * x
    trainer.images, trainer.labels = scaled[kept], y[kept]
    trainer.validation_images, trainer.validation_labels = scaled[tested], y[tested]
    return trainer
