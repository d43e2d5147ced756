"""What the runs of a gradient attack on one batch share."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from jem_robust_attacks.batch import Batch
from jem_robust_attacks.norms import spread

STREAK = 3  # gradients in a row whose draws are fooled before a random model is asked whether it is

# Candidates (n, ...) of the images at (n,) -> (n,) bool: whether the caller, who judges, wants no better.
Settled = Callable[[Tensor, Tensor], Tensor]


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
    settled: Settled | None = None
    active: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.active = torch.ones_like(self.batch.nonfinite)
        self._streak = torch.zeros_like(self.batch.queries)
        self._patience = torch.full_like(self.batch.queries, STREAK)

    @property
    def knows(self) -> bool:
        """Whether it comes out on the way which images are fooled."""
        return self.batch.target.deterministic or self.settled is not None

    def leaves(self, x: Tensor, rows: Tensor, fooled: Tensor) -> Tensor:
        """Which of x (n, ...), fooled (n,) in the draws of this gradient, are done: (n,) bool.

        On a deterministic model those; on a random one those that `settled` confirms, asked after several fooled
        gradients in a row, and after twice as many each time it says no.
        """
        asked = fooled
        if not self.batch.target.deterministic:
            self._streak[rows] = torch.where(fooled, self._streak[rows] + 1, 0)
            asked = self._streak[rows] >= self._patience[rows]
            self._patience[rows[asked]] *= 2
        return self.confirmed(x, rows, asked)

    def confirmed(self, x: Tensor, rows: Tensor, asked: Tensor) -> Tensor:
        """Which of the x (n, ...) asked about, (n,) bool, are done for whoever judges; they are active no more."""
        done = asked & self.batch.target.deterministic
        some = asked.nonzero().squeeze(1)
        if self.settled is not None and len(some) and not self.batch.target.deterministic:
            done[some] = self.settled(x[some], rows[some])
        self.active[rows[done]] = False
        return done

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
