"""The images under attack with all that goes with them, checked once; and drawing logits for them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jem_robust_attacks.losses import margin, wrong
from jem_robust_attacks.target import PROBE_DRAWS, CallableTarget, Target, as_target

Report = Callable[[int], None]


@dataclass
class Batch:
    """images (N, C, H, W) in the target's bounds, labels and ids int64 (N,), all on one device.

    queries (N,) counts draws; every draw id is used once, so that checks and confirmations see fresh noise.
    nonfinite (N,): images for which a logit (or, noted by an attack, a gradient) was not finite.
    """

    target: Target
    images: Tensor
    labels: Tensor
    ids: Tensor
    seed: int
    queries: Tensor
    report: Report
    next_draw: int = 0
    nonfinite: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.nonfinite = torch.zeros_like(self.queries, dtype=torch.bool)

    @classmethod
    def of(
        cls, model: Any, images: Any, labels: Any, seed: int, image_ids: Any = None, progress: Report | None = None,
        most: int | None = None,
    ) -> "Batch":  # fmt: skip
        """Check and convert what a caller hands over. Raises TypeError and ValueError that say what to change.

        most: draws there are an image; a model that does not say whether it is random counts as such if probing it
        would cost more.
        """
        x = _tensor(images)
        if not x.is_floating_point():
            raise TypeError(f"expected floating point images, got {x.dtype}: divide by 255")
        if x.dim() < 2:
            raise ValueError(f"expected a batch of images (N, ...), got shape {tuple(x.shape)}: add an axis")
        bounds = getattr(model, "bounds", (0.0, 1.0))
        check_box("images", x, bounds)
        x = x.clamp(*map(float, bounds))
        y = class_indices(labels).to(x.device)
        ids = torch.arange(len(x)) if image_ids is None else _tensor(image_ids)
        if ids.is_floating_point() and ids.numel():
            raise TypeError(f"expected integer image ids, got {ids.dtype}: convert them with .long()")
        ids = ids.to(x.device, torch.int64)
        if y.shape != (len(x),) or ids.shape != (len(x),):
            raise ValueError(
                f"expected {len(x)} labels and image ids, got {tuple(y.shape)} and {tuple(ids.shape)}: one an image"
            )
        poor = most is not None and most < PROBE_DRAWS
        target = as_target(model, x[:0] if poor else x)
        if poor and isinstance(target, CallableTarget) and not isinstance(getattr(model, "deterministic", None), bool):
            target.deterministic = False
        queries = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        if isinstance(target, CallableTarget) and target is not model:
            queries[: target.probed] += PROBE_DRAWS
        return cls(target, x, y, ids, int(seed), queries, progress or (lambda draws: None))

    def fresh(self, count: int) -> range:
        """`count` draw ids that nothing has used yet."""
        self.next_draw += count
        return range(self.next_draw - count, self.next_draw)

    def logits(self, x: Tensor, rows: Tensor, draws: range) -> Tensor:
        """Logits (D * n, K), draw by draw, of images x (n, ...) that stand for the rows (n,) of the batch.

        The model gets x in the dtype of the caller's images. Raises ValueError for what are no logits for the labels.
        """
        self.queries[rows] += len(draws)
        self.report(len(draws) * len(rows))
        ids = self.ids[rows].repeat(len(draws))
        draw_ids = torch.tensor(draws, dtype=torch.int64, device=x.device).repeat_interleave(len(rows))
        inputs = x.to(self.images.dtype).repeat(len(draws), *[1] * (x.dim() - 1))
        logits = self.target.draw(inputs, ids, draw_ids, "attack", self.seed)
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        if len(shape) != 2 or shape[0] != len(ids):
            raise ValueError(
                f"expected logits ({len(ids)}, K) from the model, got {shape}: one row of classes an image"
            )
        if int(self.labels.max()) >= shape[1]:
            raise ValueError(f"expected labels from 0 to {shape[1] - 1}, got {int(self.labels.max())}: renumber them")
        self.nonfinite[rows] |= ~torch.isfinite(logits.detach()).all(1).view(len(draws), -1).all(0)
        return logits

    def shares(self, x: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Share of `count` fresh draws (deterministic: 1) in which x (n, ...) is wrong, and mean margin: (n,) each."""
        draws = self.fresh(1 if self.target.deterministic else count)
        if len(rows) == 0:
            return self.images.new_zeros(0), self.images.new_zeros(0)
        with torch.no_grad():
            logits, labels = self.logits(x, rows, draws), self.labels[rows].repeat(len(draws))
            share = wrong(logits, labels).double().view(len(draws), -1).mean(0)
            return share, torch.nan_to_num(margin(logits, labels), torch.inf).view(len(draws), -1).mean(0)

    def generator(self, row: int, *words: int) -> np.random.Generator:
        """Random numbers of one image, keyed by seed, image id and the words given: independent of the batch."""
        return np.random.default_rng([self.seed % 2**64, int(self.ids[row]) % 2**64, *words])


def _tensor(values: Any) -> Tensor:
    """A copy without graph, of whatever holds numbers."""
    try:
        return values.detach().clone() if isinstance(values, Tensor) else torch.as_tensor(np.array(values))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"expected a tensor, an array or a list of numbers, got {type(values).__name__}: {error}"
        ) from error


def check_box(what: str, x: Tensor, bounds: tuple[float, float]) -> None:
    """Raise ValueError that names both ranges where x, of any shape, leaves the bounds by more than 1e-6 or is NaN."""
    low, high = bounds
    if x.numel() and not bool((x >= low - 1e-6).logical_and(x <= high + 1e-6).all()):
        got = f"[{float(x.min()):.6g}, {float(x.max()):.6g}]"
        raise ValueError(f"expected {what} within [{low}, {high}], got {got}: rescale them, remove NaN")


def check_starts(starts: Tensor, bounds: tuple[float, float]) -> None:
    """Raise ValueError for starts, of any shape, that are not finite or not within the bounds."""
    if not bool(torch.isfinite(starts).all()):
        raise ValueError("expected finite starts, got NaN or infinity: pass the images where there is nothing better")
    check_box("starts", starts, bounds)


def class_indices(labels: Any) -> Tensor:
    """Int64 labels (N,) from integer tensors, arrays or lists, (N, 1) columns or one-hot rows.

    Raises TypeError for anything but integers, ValueError for rows that are not one-hot and for negative labels.
    """
    y = _tensor(labels)
    if y.dim() == 2 and y.shape[1] > 1:
        if not bool((((y == 1).sum(1) == 1) & ((y != 0).sum(1) == 1)).all()):
            raise ValueError(f"expected (N,), (N, 1) or one-hot labels, got {tuple(y.shape)} that are not one-hot")
        y = y.long().argmax(1)
    elif y.dim() == 2:
        y = y[:, 0]
    if y.numel() and (y.is_floating_point() or y.is_complex() or y.dtype == torch.bool):
        raise TypeError(f"expected integer labels, got {y.dtype}: convert them with .long()")
    y = y.to(torch.int64)
    if y.numel() and int(y.min()) < 0:
        raise ValueError(f"expected labels from 0 up, got {int(y.min())}: renumber them")
    return y
