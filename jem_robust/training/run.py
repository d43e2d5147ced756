"""From data to a trained, carded model: what `jem-robust train` calls."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jem_robust.checkpoints import build_from
from jem_robust.images import check_images, check_labels
from jem_robust.langevin import Refinement
from jem_robust.training.trainer import Trainer, TrainingSettings


def train(
    images: Tensor, labels: Tensor, settings: TrainingSettings, out: str | Path, *, architecture: str = "small-resnet",
    width: int = 16, about: dict[str, Any] | None = None, resume: bool = False, show: bool = True,
) -> dict[str, float]:  # fmt: skip
    """Train a network from scratch (or resume) and return the best checkpoint's metrics.

    images (N, C, H, W) in [0, 1] and labels (N,); out: folder of model.safetensors and training-state.pt.
    about: free entries of the card (name, description, data, licence, command). Raises DivergenceError, ValueError.
    """
    images = check_images(images)
    labels = check_labels(labels, len(images))
    shape, classes = tuple(images.shape[1:]), int(labels.max()) + 1 if len(labels) else 1
    design = {"name": architecture, "channels": shape[0], "num_classes": classes, "width": width}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(settings.seed)  # torch.manual_seed would reach into every GPU as well
        network = build_from(design)
    card = {
        **(about or {}),
        "architecture": design,
        "input_range": settings.input_range,
        "input_shape": shape,
        "num_classes": classes,
        "refinement": asdict(evaluation_refinement(settings)),
        "torch": torch.__version__,
    }
    trainer = Trainer(network, images, labels, settings, out, card, show)
    if resume:
        trainer.resume()
    return trainer.fit()


def evaluation_refinement(settings: TrainingSettings) -> Refinement:
    """The chain a trained model classifies with: that of its training, five at a time; no steps after `ce`."""
    if settings.objective == "ce":
        return Refinement(steps=0)
    sampler = settings.sampler
    return Refinement(sampler.steps, sampler.step_size, sampler.noise, chains=5, clamp=sampler.clamp)
