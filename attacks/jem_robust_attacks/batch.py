"""The images under attack with all that goes with them, checked once; and drawing logits for them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jem_robust_attacks.losses import margin, wrong
from jem_robust_attacks.target import Target, as_target

Report = Callable[[int], None]


@dataclass
class Batch:
    """images (N, C, H, W) in the target's bounds, labels and ids int64 (N,), all on one device.

    queries (N,) counts draws; every draw id is used once, so that checks and confirmations see fresh noise.
    """

    target: Target
    images: Tensor
    labels: Tensor
    ids: Tensor
    seed: int
    queries: Tensor
    report: Report
    next_draw: int = 0

    @classmethod
    def of(
        cls, model: Any, images: Any, labels: Any, seed: int, image_ids: Any = None, progress: Report | None = None
    ) -> "Batch":
        """Check and convert what a caller hands over. Raises TypeError and ValueError that say what to change."""
        x = torch.as_tensor(images).detach()
        if not x.is_floating_point():
            raise TypeError(f"expected floating point images, got {x.dtype}: divide by 255")
        if x.dim() < 2:
            raise ValueError(f"expected a batch of images (N, ...), got shape {tuple(x.shape)}")
        target = as_target(model, x)
        low, high = target.bounds
        if x.numel() and not bool((x >= low - 1e-6).logical_and(x <= high + 1e-6).all()):
            raise ValueError(
                f"expected images within [{low}, {high}], got [{float(x.min()):.6g}, {float(x.max()):.6g}]: rescale them"
            )
        y = class_indices(labels).to(x.device)
        ids = torch.arange(len(x)) if image_ids is None else torch.as_tensor(image_ids)
        ids = ids.to(x.device, torch.int64)
        if y.shape != (len(x),) or ids.shape != (len(x),):
            raise ValueError(f"expected {len(x)} labels and image ids, got {tuple(y.shape)} and {tuple(ids.shape)}")
        queries = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        return cls(target, x.clamp(low, high), y, ids, seed, queries, progress or (lambda draws: None))

    def fresh(self, count: int) -> range:
        """`count` draw ids that nothing has used yet."""
        self.next_draw += count
        return range(self.next_draw - count, self.next_draw)

    def logits(self, x: Tensor, rows: Tensor, draws: range) -> Tensor:
        """Logits (D * n, K), draw by draw, of images x (n, ...) that stand for the rows (n,) of the batch."""
        self.queries[rows] += len(draws)
        self.report(len(draws) * len(rows))
        ids = self.ids[rows].repeat(len(draws))
        draw_ids = torch.tensor(draws, dtype=torch.int64, device=x.device).repeat_interleave(len(rows))
        return self.target.draw(x.repeat(len(draws), *[1] * (x.dim() - 1)), ids, draw_ids, "attack", self.seed)

    def shares(self, x: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Share of `count` fresh draws (1 if deterministic) in which x (n, ...) is wrong, and the mean margin: (n,) each."""
        draws = self.fresh(1 if self.target.deterministic else count)
        with torch.no_grad():
            logits, labels = self.logits(x, rows, draws), self.labels[rows].repeat(len(draws))
            share = wrong(logits, labels).double().view(len(draws), -1).mean(0)
            return share, torch.nan_to_num(margin(logits, labels), torch.inf).view(len(draws), -1).mean(0)

    def generator(self, row: int, *words: int) -> np.random.Generator:
        """Random numbers of one image, keyed by seed, image id and the words given: independent of the batch."""
        return np.random.default_rng([self.seed % 2**64, int(self.ids[row]) % 2**64, *words])


def class_indices(labels: Any) -> Tensor:
    """Int64 labels (N,) from integer tensors, arrays or lists, (N, 1) columns or one-hot rows."""
    y = labels.detach() if isinstance(labels, Tensor) else torch.as_tensor(np.array(labels))
    if y.dim() == 2:
        y = y.argmax(1) if y.shape[1] > 1 else y[:, 0]
    elif y.numel() and y.is_floating_point():
        raise TypeError(f"expected integer labels, got {y.dtype}: convert them with .long()")
    return y.to(torch.int64)
