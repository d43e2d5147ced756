"""The leading candidates of all images, and what was found at each eps, brought together upward."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from jem_robust.evaluation.verdict import Score


@dataclass
class Lead:
    """Leading candidates x (N, C, H, W), their select scores, share of correct judge draws (N,), and source (N,).

    source: place of the attack the candidate comes from, -1 for the clean image.
    """

    x: Tensor
    selected: Score
    judged: Tensor
    source: Tensor

    def copy(self) -> "Lead":
        """Tensors of its own."""
        rows = torch.arange(len(self.x), device=self.x.device)
        return Lead(self.x.clone(), self.selected.rows(rows), self.judged.clone(), self.source.clone())

    def take(self, rows: Tensor, x: Tensor, selected: Score, source: int | Tensor) -> None:
        """Let candidates x (n, ...) of an attack lead the rows (n,); they are still to be judged."""
        self.x[rows], self.source[rows] = x, source
        self.selected.update(rows, selected)

    def follow(self, rows: Tensor, other: "Lead") -> None:
        """Take over some rows of another lead, verdict and all."""
        self.x[rows], self.judged[rows], self.source[rows] = other.x[rows], other.judged[rows], other.source[rows]
        self.selected.update(rows, other.selected.rows(rows))


@dataclass(eq=False)
class Level:
    """What one eps has come to. bad: images (N,) with a gradient that was not finite; attacks: a record of each."""

    eps: float
    lead: Lead
    bad: Tensor
    attacks: list[dict[str, Any]]


@dataclass
class Levels:
    """Levels done so far, by eps."""

    done: list[Level] = field(default_factory=list)

    def add(self, level: Level) -> None:
        """Keep a level; what leads there may lead at larger eps too, where it is within the ball as well."""
        self.done = sorted([*self.done, level], key=lambda other: other.eps)
        for larger in self.done[self.done.index(level) + 1 :]:
            better = level.lead.selected.worse_than(larger.lead.selected)
            larger.lead.follow(better.nonzero().squeeze(1), level.lead)

    def results(self) -> tuple[list[Tensor], list[Tensor], list[dict[str, Any]]]:
        """For each eps: share of correct judge draws (N,), images (N, C, H, W), and what the attacks did."""
        bad = torch.zeros(0, dtype=torch.bool)
        p_correct, adversarials, rows = [], [], []
        for level in self.done:
            if level.eps > 0:  # what could not be differentiated is not robust, here and at larger eps
                bad = level.bad if not len(bad) else bad | level.bad
            p = torch.where(bad, 0.0, level.lead.judged) if len(bad) else level.lead.judged
            attacks = [{**a, "accuracy": min(a["accuracy"], float(p.mean()))} for a in level.attacks[-1:]]
            rows.append({
                "eps": level.eps, "attacks": [*level.attacks[:-1], *attacks], "source": level.lead.source.tolist(),
                "nonfinite_gradient": bad.nonzero().squeeze(1).tolist(),
            })  # fmt: skip
            p_correct.append(p)
            adversarials.append(level.lead.x)
        return p_correct, adversarials, rows
