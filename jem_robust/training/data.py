"""Training data: checked, scaled to the network's range, and a part of it held back for validation."""

import torch
from torch import Tensor

from jem_robust.images import check_images, check_labels
from jem_robust.training.settings import TrainingSettings


def split(images: Tensor, labels: Tensor, settings: TrainingSettings) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, then validation images and labels; images float32 in network units.

    Which images are held back depends on their number and the seed alone.
    Raises TypeError and ValueError for data that cannot be trained on.
    """
    images = check_images(images).float()
    labels = check_labels(labels, len(images))
    count = settings.validation_images
    if len(images) <= count:
        raise ValueError(
            f"expected more than {count} images, of which as many are held back for validation, got {len(images)}: "
            "pass more or lower validation_images"
        )
    low, high = settings.input_range
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(settings.seed))
    held, kept = order[:count], order[count:]
    missing = sorted(set(range(int(labels.max()) + 1)) - set(labels[kept].tolist()))
    if missing:
        raise ValueError(f"expected training images of every class, got none of {missing}: renumber or add some")
    if settings.batch_size > len(kept):
        raise ValueError(f"expected a batch size up to the {len(kept)} training images, got {settings.batch_size}")
    scaled = low + (high - low) * images
    return scaled[kept], labels[kept], scaled[held], labels[held]
