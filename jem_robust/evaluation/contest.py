"""Candidates of all images contend on common select draws; what leads is judged on judge draws (DESIGN 5.6)."""

from collections.abc import Callable

import torch
from torch import Tensor

from jem_robust.evaluation.levels import Lead
from jem_robust.evaluation.verdict import Score, score
from jem_robust_attacks.target import Target

SCORE_ROWS = 512  # draws scored in one call, fewer where images are large:
SCORE_VALUES = 2**26  # pixel values of all their chains together
FEW_DRAWS = 3  # after which most of what does not fool every select draw is known


class Contest:
    """lead: the leading candidates, at first the images (N, C, H, W) themselves, which stay in `unperturbed`.

    chains: rows that a draw of one image takes. report: called after work was done.
    """

    def __init__(
        self, target: Target, images: Tensor, labels: Tensor, draws: int, select_draws: int, seed: int, chains: int,
        report: Callable[[], None],
    ) -> None:  # fmt: skip
        self.target, self.labels, self.seed, self.report = target, labels, seed, report
        self.draws, self.select_draws = range(draws), range(select_draws)
        self._batch = max(1, min(SCORE_ROWS, SCORE_VALUES // (chains * images[0].numel())))
        everything = torch.arange(len(images), device=images.device)
        selected = self.score(images, everything, "select", self.select_draws)
        judged = self.score(images, everything, "judge", self.draws)
        shares = judged.correct.double() / draws
        self.bad_logits = selected.nonfinite | judged.nonfinite
        self.unperturbed = Lead(images.clone(), selected, shares, torch.full_like(labels, -1))
        self.lead = self.unperturbed.copy()

    def score(self, x: Tensor, rows: Tensor, purpose: str, draws: range) -> Score:
        """Scores of candidates x (n, ...) of the images at rows (n,)."""
        if len(x) == 0:  # not every model takes none
            return Score(rows.clone(), rows.double(), rows.bool())
        result = score(self.target, x, self.labels[rows], rows, draws, purpose, self.seed, self._batch)
        self.report()
        return result

    def offer(self, candidate: Tensor, rows: Tensor, new: Tensor, source: int) -> Tensor:
        """Let candidates (n, ...) lead rows (n,) where they are new, (n,) bool, and select better: (n,) bool."""
        some = new.nonzero().squeeze(1)
        scored = self.score(candidate[some], rows[some], "select", self.select_draws)
        self.bad_logits[rows[some]] |= scored.nonfinite
        better = scored.worse_than(self.lead.selected.rows(rows[some])).nonzero().squeeze(1)
        self.lead.take(rows[some[better]], candidate[some[better]], scored.rows(better), source)
        won = torch.zeros_like(new)
        won[some[better]] = True
        return won

    def settle(self, x: Tensor, rows: Tensor, source: int | None) -> Tensor:
        """Which of candidates x (n, ...) are wrong in all select draws; they lead from now on: (n,) bool.

        source None: that of the lead they come from.
        """
        few = len(self.select_draws[:FEW_DRAWS])
        scored = self.score(x, rows, "select", self.select_draws[:few])
        left = (scored.correct == 0).nonzero().squeeze(1)
        scored = scored.rows(left)
        if (more := self.select_draws[few:]) and len(left):
            rest = self.score(x[left], rows[left], "select", more)
            scored = scored.joined(rest, few / len(self.select_draws))
        winners = (scored.correct == 0).nonzero().squeeze(1)
        won = left[winners]
        self.bad_logits[rows[won]] |= scored.nonfinite[winners]
        origin = self.lead.source[rows[won]] if source is None else source
        self.lead.take(rows[won], x[won], scored.rows(winners), origin)
        settled = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        settled[won] = True
        return settled

    def judge(self, moved: Tensor) -> None:
        """Judge images whose leading candidate changed; the others' verdict stands, the draws being the same."""
        rows = moved.nonzero().squeeze(1)
        if len(rows):
            result = self.score(self.lead.x[rows], rows, "judge", self.draws)
            self.lead.judged[rows] = result.correct.double() / len(self.draws)
            self.bad_logits[rows] |= result.nonfinite
            moved[rows] = False

    @property
    def clean(self) -> float:
        """Mean share of correct judge draws of the images themselves."""
        return float(self.unperturbed.judged.mean())
