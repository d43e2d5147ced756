"""A gradient attack on a deterministic model at many epsilons: from the largest down, only on what it still breaks.

What fails at one eps is not tried at a smaller one, and what succeeds is drawn towards the image as far as it still
fools, which skips every eps beyond: so nearly all images cost one attack that fails, whatever the number of epsilons.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from jem_robust_attacks.batch import Batch, Report
from jem_robust_attacks.norms import distance, project, spread
from jem_robust_attacks.pgd import PGD, ROUNDING, sure

BISECTIONS = 5


@dataclass(frozen=True)
class Descent:
    """PGD at each of `epsilons`, restart 1 starting from what was found at a larger one (Madry et al. 2018).

    Yields, for every image, the closest image found that surely fools the model. Only for deterministic models.
    """

    attack: PGD
    epsilons: Sequence[float]
    minimizes: ClassVar[bool] = True

    @property
    def norm(self) -> str:
        """Of the attack."""
        return self.attack.norm

    @torch.inference_mode(False)
    @torch.no_grad()
    def search(
        self, model: Any, images: Any, labels: Any, eps: None = None, seed: int = 0, image_ids: Any = None,
        starts: Tensor | None = None, progress: Report | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Candidates (N, 1, C, H, W), the images themselves where none was found, and nonfinite flags (N,)."""
        batch = Batch.of(model, images, labels, seed, image_ids, progress)
        sizes = torch.tensor(sorted(e for e in self.epsilons if e > 0), dtype=torch.float64, device=batch.ids.device)
        # What fooled the model is where its run was left, but for models too coarse to be sure of it.
        attack = replace(self.attack, keep=int(getattr(batch.target, "rounding", ROUNDING) > ROUNDING))
        closest = batch.images.clone()
        # The eps each image is tried at next, by its place; images wrong from the start are left alone, below all.
        level = torch.where(_surely(batch, closest, torch.arange(len(closest)).to(batch.ids)), -1, len(sizes) - 1)
        while len(rows := (level >= 0).nonzero().squeeze(1)):
            center, radius = batch.images[rows], sizes[level[rows]]
            start = project(closest[rows], center, radius, self.norm, batch.target.bounds)
            found, bad = attack.search(
                model, center, batch.labels[rows], radius, seed, batch.ids[rows], start, progress
            )
            batch.nonfinite[rows] |= bad
            broken = torch.zeros_like(rows, dtype=torch.bool)
            for candidate in found.unbind(1):
                left = (~broken).nonzero().squeeze(1)
                won = left[batch.shares(candidate[left], rows[left], 1)[0] > 0]
                if len(won):
                    broken[won] = True
                    closest[rows[won]] = self._drawn(batch, candidate[won], rows[won])
            reached = distance(closest[rows], center, self.norm)
            below = torch.minimum(torch.searchsorted(sizes, reached - 1e-9), level[rows]) - 1
            level[rows] = torch.where(broken, below, -1)
        return closest.unsqueeze(1), batch.nonfinite

    def _drawn(self, batch: Batch, x: Tensor, rows: Tensor) -> Tensor:
        """x (n, ...) moved towards the images on a straight line, as far as it surely fools."""
        center = batch.images[rows]
        high = torch.ones_like(rows, dtype=torch.float64)
        low = torch.zeros_like(high)
        best = x
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            nearer = (center.double() + spread(middle, x) * (x.double() - center.double())).to(x.dtype)
            fooled = _surely(batch, nearer, rows)
            best = torch.where(spread(fooled, x), nearer, best)
            low, high = torch.where(fooled, low, middle), torch.where(fooled, middle, high)
        return best


def _surely(batch: Batch, x: Tensor, rows: Tensor) -> Tensor:
    """Which of x (n, ...) fool the model by more than rounding: (n,) bool."""
    return sure(batch.logits(x, rows, batch.fresh(1)), batch.labels[rows], ROUNDING)
