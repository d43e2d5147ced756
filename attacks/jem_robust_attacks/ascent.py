"""What the runs of a gradient attack on one batch share."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from jem_robust_attacks.batch import Batch
from jem_robust_attacks.losses import towards
from jem_robust_attacks.norms import spread

RANKED_CLASSES = 5  # classes whose boundary is measured, by one gradient each, to choose targets


class Best:
    """The few images of largest running loss."""

    def __init__(self, images: Tensor, keep: int) -> None:
        self.images = [images.clone() for _ in range(keep)]
        self._values = torch.full((keep, len(images)), -torch.inf, dtype=torch.float64, device=images.device)

    def offer(self, rows: Tensor, x: Tensor, value: Tensor) -> None:
        """Let x (n, ...) of loss value (n,) take a place, pushing smaller ones down; NaN counts as the largest."""
        value = torch.nan_to_num(value.double(), torch.inf)
        for place, images in enumerate(self.images):
            held_x, held = images[rows], self._values[place, rows]
            better = value > held
            images[rows] = torch.where(spread(better, x), x, held_x)
            self._values[place, rows] = torch.where(better, value, held)
            x, value = torch.where(spread(better, x), held_x, x), torch.where(better, held, value)


@dataclass
class Ascent:
    """What the runs on one batch share: radius (N,), and active (N,), the images not yet surely fooled."""

    batch: Batch
    center: Tensor
    radius: Tensor
    eot: Tensor
    best: Best
    active: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.active = torch.ones_like(self.batch.nonfinite)

    def margins(self, x: Tensor) -> Tensor:
        """Margins of what is active, without the rounding of gradients' precision; -inf of the rest: (N,)."""
        rows = self.active.nonzero().squeeze(1)
        margins = torch.full((len(x),), -torch.inf, dtype=torch.float64, device=x.device)
        margins[rows] = self.batch.shares(x[rows], rows, 1)[1].double()
        return margins

    def near(self, x: Tensor, limit: Tensor) -> Tensor:
        """What is active and whose margin at x (N, ...) is not gone, but above `limit` (N,): (N,) bool."""
        now = self.margins(x)
        return (now >= limit) & (now <= 0) & self.active


def nearest_classes(ascent: Ascent, wanted: int, norm: str) -> list[Tensor]:
    """Classes (N,) to try in turn on what stands: those whose linearised decision boundary is nearest."""
    batch = ascent.batch
    rows = ascent.active.nonzero().squeeze(1)
    if len(rows) == 0:
        return []
    labels = batch.labels[rows]
    with torch.enable_grad():
        leaf = ascent.center[rows].requires_grad_()
        logits = batch.logits(leaf, rows, batch.fresh(1))
        likeliest = min(RANKED_CLASSES, logits.shape[1] - 1)
        others = logits.detach().scatter(1, labels[:, None], -torch.inf).topk(likeliest, 1)
        if not logits.requires_grad:
            return []
        gaps = others.values - logits.detach().gather(1, labels[:, None])
        slopes = []
        for classes in others.indices.T:
            value = towards(classes)(logits, labels).sum()
            (slope,) = torch.autograd.grad(value, leaf, retain_graph=True, allow_unused=True)
            if slope is None:
                return []
            slopes.append(slope.flatten(1).norm(1 if norm == "linf" else 2, dim=1))
    distances = -gaps / torch.stack(slopes, 1).clamp_min(torch.finfo(gaps.dtype).tiny)
    nearest = others.indices.gather(1, torch.nan_to_num(distances, torch.inf).argsort(1))
    return [batch.labels.index_put((rows,), classes) for classes in nearest[:, :wanted].T]
