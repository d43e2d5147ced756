"""Projected gradient ascent in a ball (Madry et al. 2018), averaging gradients over draws of a random model.

EOT (expectation over transformation): Athalye et al. 2018.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from jem_robust_attacks.batch import Batch, Report
from jem_robust_attacks.losses import LOSSES, ascent_weights, margin
from jem_robust_attacks.norms import distance, parse_epsilon, parse_norm, project, random_offset, spread, steepest
from jem_robust_attacks.result import AttackResult

EOT_CAP = 32
EOT_AGREEMENT = 0.9
EOT_PROBE_IMAGES = 8
CONFIRM_DRAWS = 10
RESTART = 1  # word that keys random starts


@dataclass(frozen=True)
class PGD:
    """Untargeted PGD.

    norm: "linf" or "l2". steps: gradient steps a restart. restarts: the first starts at `starts` (default: the image),
    further ones at random in the ball. eot: draws averaged per gradient; "auto": 1 for a deterministic model, else
    doubled until two half-means agree (cosine at least .9), at most 32. loss: "ce", "margin" or "dlr".
    step_size: in image units, 2.5 * eps / steps by default. keep: images by best running loss that are handed over as
    candidates beside each restart's last iterate. Raises ValueError on settings out of range.
    """

    norm: str = "linf"
    steps: int = 40
    restarts: int = 1
    eot: int | Literal["auto"] = "auto"
    loss: str = "ce"
    step_size: float | None = None
    keep: int = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", parse_norm(self.norm))
        if self.loss not in LOSSES:
            raise ValueError(f"expected a loss out of {sorted(LOSSES)}, got {self.loss!r}")
        for name in ("steps", "restarts", "keep"):
            if getattr(self, name) < (0 if name == "keep" else 1):
                raise ValueError(f"expected {name} of at least 1, got {getattr(self, name)}")
        if self.eot != "auto" and (not isinstance(self.eot, int) or self.eot < 1):
            raise ValueError(f"expected eot 'auto' or a whole number from 1 up, got {self.eot!r}")
        if self.step_size is not None and not self.step_size > 0:
            raise ValueError(f"expected a positive step_size, got {self.step_size!r}: leave it out for 2.5*eps/steps")

    def __call__(
        self, model: Any, images: Any, labels: Any, eps: Any = None, seed: int = 0, image_ids: Any = None,
        starts: Tensor | None = None, progress: Report | None = None,
    ) -> AttackResult:  # fmt: skip
        """Attack images (N, C, H, W) of true labels (N,) within eps; success is a majority verdict on fresh draws."""
        batch = Batch.of(model, images, labels, seed, image_ids, progress)
        candidates, nonfinite = self._climb(batch, _given(eps), starts)
        rows = torch.arange(len(batch.images), device=batch.images.device)
        chosen = self._chosen(batch, candidates, rows)
        # Choosing looked at these draws, so the verdict needs others; a clean image that is wrong needs no attack.
        clean = batch.shares(batch.images, rows, CONFIRM_DRAWS)[0] >= 0.5
        success = clean | (batch.shares(chosen, rows, CONFIRM_DRAWS)[0] >= 0.5)
        moved = spread(success & ~clean, chosen)
        adversarials = torch.where(moved, chosen, batch.images)
        distances = torch.where(success, distance(adversarials, batch.images, self.norm), torch.inf)
        return AttackResult(adversarials, distances, success, batch.queries, candidates, nonfinite)

    def search(
        self, model: Any, images: Any, labels: Any, eps: Any = None, seed: int = 0, image_ids: Any = None,
        starts: Tensor | None = None, progress: Report | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Candidates (N, M, C, H, W) and nonfinite flags (N,), for a caller with a verdict of its own."""
        return self._climb(Batch.of(model, images, labels, seed, image_ids, progress), _given(eps), starts)

    def _chosen(self, batch: Batch, candidates: Tensor, rows: Tensor) -> Tensor:
        """The candidate wrong most often, then of largest margin, on common fresh draws."""
        begin = batch.next_draw
        share, gap = [], []
        for m in range(candidates.shape[1]):
            batch.next_draw = begin
            s, g = batch.shares(candidates[:, m], rows, CONFIRM_DRAWS)
            share.append(s)
            gap.append(g)
        shares, gaps = torch.stack(share), torch.stack(gap)
        gaps = torch.where(shares == shares.amax(0), gaps, -torch.inf)
        return candidates[rows, gaps.argmax(0)]

    def _climb(self, batch: Batch, eps: float, starts: Tensor | None) -> tuple[Tensor, Tensor]:
        images = batch.images
        nonfinite = torch.zeros(len(images), dtype=torch.bool, device=images.device)
        if eps == 0 or len(images) == 0:
            return images.unsqueeze(1).clone(), nonfinite
        eot = self._eot(batch)
        best = _Best(images, self.keep)
        active = torch.ones_like(nonfinite)
        lasts = []
        for restart in range(self.restarts):
            x = self._start(batch, eps, restart, starts)
            for _ in range(self.steps):
                rows = active.nonzero().squeeze(1)
                if len(rows) == 0:
                    break
                gradient, value, fooled = self._gradient(batch, x[rows], rows, eot)
                best.offer(rows, x[rows], value)
                nonfinite[rows] |= ~torch.isfinite(gradient).flatten(1).all(1)
                length = self.step_size or 2.5 * eps / self.steps
                climbed = x[rows] + length * steepest(gradient, self.norm)
                # What surely fools a deterministic model is done; moving on could only lose it.
                x[rows] = torch.where(
                    spread(fooled, climbed), x[rows], project(climbed, images[rows], eps, self.norm, batch.target.bounds)
                )
                active[rows[fooled]] = False
            lasts.append(x)
        return torch.stack([*lasts, *best.images], 1), nonfinite

    def _start(self, batch: Batch, eps: float, restart: int, starts: Tensor | None) -> Tensor:
        images = batch.images
        if restart == 0:
            x = images if starts is None else torch.as_tensor(starts).to(images)
        else:
            shape = tuple(images.shape[1:])
            offsets = [random_offset(shape, eps, self.norm, batch.generator(i, RESTART, restart)) for i in range(len(images))]
            x = images + torch.stack(offsets).to(images)
        return project(x, images, eps, self.norm, batch.target.bounds).clone()

    def _gradient(self, batch: Batch, x: Tensor, rows: Tensor, eot: int) -> tuple[Tensor, Tensor, Tensor]:
        """Ascent direction (n, ...), mean loss (n,), and which rows surely fool a deterministic model (n,)."""
        labels = batch.labels[rows].repeat(eot)
        with torch.inference_mode(False), torch.enable_grad():
            leaf = x.clone().requires_grad_()
            logits = batch.logits(leaf, rows, batch.fresh(eot))
            weights, values = ascent_weights(logits, labels, LOSSES[self.loss], eot)
            (gradient,) = torch.autograd.grad(logits, leaf, weights)
        value = values.view(eot, -1).mean(0)
        if not batch.target.deterministic:
            return gradient, value, torch.zeros(len(rows), dtype=torch.bool, device=x.device)
        scale = 1e-5 * (1 + logits.detach().abs().amax(1))  # beyond what another batch size could round away
        return gradient, value, margin(logits.detach(), labels) > scale

    def _eot(self, batch: Batch) -> int:
        if self.eot != "auto":
            return self.eot
        if batch.target.deterministic:
            return 1
        rows = torch.arange(min(len(batch.images), EOT_PROBE_IMAGES), device=batch.images.device)
        eot = 1
        halves = [self._gradient(batch, batch.images[rows], rows, eot)[0].flatten(1) for _ in range(2)]
        while eot < EOT_CAP and float(F.cosine_similarity(*halves).mean()) < EOT_AGREEMENT:
            eot *= 2
            halves = [sum(halves) / 2, self._gradient(batch, batch.images[rows], rows, eot)[0].flatten(1)]  # type: ignore[list-item]
        return eot


class _Best:
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


def _given(eps: Any) -> float:
    if eps is None:
        raise ValueError("expected eps, got None: PGD searches within a ball, so pass its radius, e.g. 8/255")
    return parse_epsilon(eps)
