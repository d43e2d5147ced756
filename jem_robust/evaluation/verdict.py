"""The decision that an image is, or is not, robust: selection, judging on keyed draws, intervals."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression
from scipy.special import betaincinv
from torch import Tensor

from jem_robust_attacks.losses import margin, wrong
from jem_robust_attacks.target import Target

LEVEL = 0.95
RESAMPLES = 2000
Floats = NDArray[np.float64]


@dataclass
class Score:
    """Correct draws (N,), mean margin of the label over the best other class (N,), any non-finite logit (N,)."""

    correct: Tensor
    margin: Tensor
    nonfinite: Tensor

    def worse_than(self, other: "Score") -> Tensor:
        """(N,) bool: fewer correct draws, or as many with a lower margin: better for an attacker."""
        return (self.correct < other.correct) | ((self.correct == other.correct) & (self.margin < other.margin))

    def joined(self, other: "Score", share: float) -> "Score":
        """The score on these draws and other ones of the same images; share: that these are of them all."""
        gaps = share * self.margin + (1 - share) * other.margin
        return Score(self.correct + other.correct, gaps, self.nonfinite | other.nonfinite)

    def rows(self, rows: Tensor) -> "Score":
        """The scores of some images."""
        return Score(self.correct[rows], self.margin[rows], self.nonfinite[rows])

    def update(self, rows: Tensor, other: "Score") -> None:
        """Overwrite the scores of some images."""
        self.correct[rows], self.margin[rows], self.nonfinite[rows] = other.correct, other.margin, other.nonfinite


def score(
    target: Target, images: Tensor, labels: Tensor, ids: Tensor, draws: range, purpose: str, seed: int, batch: int
) -> Score:
    """Score images (N, C, H, W) on some draws of a purpose: the same noise whichever candidate is scored.

    batch: rows (images x draws) handed to the model at once. A draw with a non-finite logit counts as wrong.
    """
    size = max(1, batch // len(draws))
    parts = [_score_part(target, *part, draws, purpose, seed) for part in zip(
        images.split(size), labels.split(size), ids.split(size), strict=True)]  # fmt: skip
    return Score(
        *(torch.cat(columns) for columns in zip(*((p.correct, p.margin, p.nonfinite) for p in parts), strict=True))
    )


def _score_part(
    target: Target, images: Tensor, labels: Tensor, ids: Tensor, draws: range, purpose: str, seed: int
) -> Score:
    n, count = len(images), len(draws)
    draw_ids = torch.tensor(draws, device=images.device).repeat_interleave(n)
    with torch.no_grad():
        logits = target.draw(images.repeat(count, 1, 1, 1), ids.repeat(count), draw_ids, purpose, seed)
        y = labels.repeat(count)
        correct = (~wrong(logits, y)).view(count, n).sum(0)
        gaps = torch.nan_to_num(-margin(logits, y).double(), nan=-torch.inf).view(count, n).mean(0)
        nonfinite = (~torch.isfinite(logits).all(1)).view(count, n).any(0)
    return Score(correct, torch.where(nonfinite, -torch.inf, gaps), nonfinite)


def monotone(raw: Floats) -> Floats:
    """Isotonic (non-increasing) regression of accuracies over increasing eps: (..., E) -> (..., E)."""
    flat = raw.reshape(-1, raw.shape[-1])
    return np.array([isotonic_regression(row, increasing=False).x for row in flat]).reshape(raw.shape)


def clopper_pearson(hits: int, n: int) -> tuple[float, float]:
    """Exact 95 % interval of a binomial share (Clopper & Pearson 1934)."""
    tail = (1 - LEVEL) / 2
    low = 0.0 if hits == 0 else float(betaincinv(hits, n - hits + 1, tail))
    high = 1.0 if hits == n else float(betaincinv(hits + 1, n - hits, 1 - tail))
    return low, high


def bootstrap_interval(p_correct: Floats, seed: int) -> tuple[Floats, Floats]:
    """95 % interval of the monotone mean over images, p_correct (E, N): percentile bootstrap over images.

    Where all images agree at 0 or 1 a bootstrap would give no width; there Clopper-Pearson of 0/N or N/N is taken.
    """
    n = p_correct.shape[1]
    weights = np.random.default_rng(seed % 2**64).multinomial(n, np.full(n, 1 / n), RESAMPLES) / n
    means = monotone(weights @ p_correct.T)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    accuracy = monotone(p_correct.mean(1))
    for value, hits in ((0.0, 0), (1.0, n)):
        same = (p_correct == value).all(1)
        low[same], high[same] = clopper_pearson(hits, n)
    return np.minimum(low, accuracy), np.maximum(high, accuracy)


def paired_difference(a: Floats, b: Floats, seed: int = 0) -> tuple[float, float, float]:
    """Mean of a - b over the same images, both (N,), with its 95 % bootstrap interval: (mean, low, high)."""
    if a.shape != b.shape or a.ndim != 1:
        raise ValueError(f"expected p_correct of the same images, got shapes {a.shape} and {b.shape}")
    difference = a - b
    n = len(difference)
    means = np.random.default_rng(seed % 2**64).multinomial(n, np.full(n, 1 / n), RESAMPLES) @ difference / n
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(difference.mean()), float(low), float(high)
