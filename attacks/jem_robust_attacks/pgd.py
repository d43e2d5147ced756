"""Projected gradient ascent in a ball (Madry et al. 2018), averaging gradients over draws of a random model.

EOT (expectation over transformation): Athalye et al. 2018.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from warnings import warn

import torch
from torch import Tensor

from jem_robust_attacks.ascent import Ascent, Best, Settled
from jem_robust_attacks.batch import Batch, Report, check_starts
from jem_robust_attacks.losses import LOSSES, Loss, ascent_weights, margin, towards, wrong
from jem_robust_attacks.norms import (
    distance,
    parse_epsilon,
    parse_norm,
    project,
    random_offset,
    rounded,
    spread,
    steepest,
    whole,
)  # fmt: skip
from jem_robust_attacks.result import AttackResult
from jem_robust_attacks.targeted import targeted_runs

EOT_CAP = 32
EOT_AGREEMENT = 0.9
CONFIRM_DRAWS = 10
ROUNDING = 1e-5  # relative error of logits, unless the model names its own
CALL = 64  # images a gradient is taken of at once: more pay nothing, and cost cache
RESTART = 1  # word that keys random starts


@dataclass(frozen=True)
class PGD:
    """Untargeted PGD.

    norm: "linf" or "l2". steps: gradient steps a restart. restarts: the first starts at `starts` (default: the image),
    further ones at random in the ball. eot: draws averaged per gradient; "auto": 1 for a deterministic model, else
    doubled, for each image by itself, until two half-means agree (cosine at least .9), at most 32. loss: "ce", "margin"
    or "dlr". step_size: in image units, 2.5 * eps / steps by default. keep: images by best running loss that are handed
    over as candidates beside each restart's last iterate. targets: classes that what still stands after all restarts,
    but not far, is driven to in short runs, linearly nearest first (Croce & Hein 2020 found targeted runs the
    strongest); "auto": 3 for a deterministic model, where it is known what stands, none for a random one. early_stop:
    leave images that surely fool the model. Raises ValueError on settings out of range.
    """

    norm: str = "linf"
    steps: int = 40
    restarts: int = 1
    eot: int | Literal["auto"] = "auto"
    loss: str = "ce"
    step_size: float | None = None
    keep: int = 3
    targets: int | Literal["auto"] = "auto"
    early_stop: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", parse_norm(self.norm))
        if self.loss not in LOSSES:
            raise ValueError(f"expected a loss out of {sorted(LOSSES)}, got {self.loss!r}")
        for name, least in (("steps", 1), ("restarts", 1), ("keep", 0)):
            object.__setattr__(self, name, whole(name, getattr(self, name), least))
        for name, least in (("eot", 1), ("targets", 0)):
            if getattr(self, name) != "auto":
                object.__setattr__(self, name, whole(name, getattr(self, name), least))
        if self.step_size is not None:
            step_size = parse_epsilon(self.step_size)
            if step_size == 0:
                raise ValueError(
                    f"expected a positive step_size, got {self.step_size!r}: leave it out for 2.5*eps/steps"
                )
            object.__setattr__(self, "step_size", step_size)

    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(
        self, model: Any, images: Any, labels: Any, eps: Any = None, seed: int = 0, image_ids: Any = None,
        starts: Tensor | None = None, progress: Report | None = None,
    ) -> AttackResult:  # fmt: skip
        """Attack images (N, C, H, W) of true labels (N,) within eps, or within one eps an image, a tensor (N,).

        Success is a majority verdict on fresh draws.
        """
        sizes = _sizes(eps)
        batch = Batch.of(model, images, labels, seed, image_ids, progress)
        candidates = self._climb(batch, _radius(sizes, batch.images), starts)
        rows = torch.arange(len(batch.images), device=batch.images.device)
        chosen = self._chosen(batch, torch.cat([batch.images.unsqueeze(1), candidates], 1), rows)
        # Choosing looked at its draws, so the verdict needs others; and only one: a second chance would flatter.
        success = batch.shares(chosen, rows, CONFIRM_DRAWS)[0] >= 0.5
        adversarials = torch.where(spread(success, chosen), chosen, batch.images)
        distances = torch.where(success, distance(adversarials, batch.images, self.norm), torch.inf)
        return AttackResult(adversarials, distances, success, batch.queries, candidates, batch.nonfinite)

    @torch.inference_mode(False)
    @torch.no_grad()
    def search(
        self, model: Any, images: Any, labels: Any, eps: Any = None, seed: int = 0, image_ids: Any = None,
        starts: Tensor | None = None, progress: Report | None = None, settled: Settled | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Candidates (N, M, C, H, W) and nonfinite flags (N,), for a caller with a verdict of its own.

        settled: asked of a random model's images that seem to be fooled; it leaves alone those for which it says yes.
        """
        sizes = _sizes(eps)
        batch = Batch.of(model, images, labels, seed, image_ids, progress)
        return self._climb(batch, _radius(sizes, batch.images), starts, settled), batch.nonfinite

    @torch.inference_mode(False)
    @torch.no_grad()
    def draws_needed(self, model: Any, images: Any, labels: Any, seed: int = 0, image_ids: Any = None) -> Tensor:
        """Draws that would be averaged for each gradient of each image: (N,) int64."""
        batch = Batch.of(model, images, labels, seed, image_ids)
        return self._eot(batch, batch.images.to(torch.promote_types(batch.images.dtype, torch.float32)))

    def _chosen(self, batch: Batch, options: Tensor, rows: Tensor) -> Tensor:
        """The option (N, M, ...) wrong most often, then of largest margin, on common fresh draws; option 0 is clean."""
        begin = batch.next_draw
        share, gap = [], []
        for m in range(options.shape[1]):
            batch.next_draw = begin
            s, g = batch.shares(options[:, m], rows, CONFIRM_DRAWS)
            share.append(s)
            gap.append(g)
        shares, gaps = torch.stack(share), torch.stack(gap)
        gaps[0] = torch.where(shares[0] >= 0.5, torch.inf, gaps[0])  # wrong as it is: nothing to gain by moving
        gaps = torch.where(shares == shares.amax(0), gaps, -torch.inf)
        return options[rows, gaps.argmax(0)]

    def _climb(self, batch: Batch, radius: Tensor, starts: Tensor | None, settled: Settled | None = None) -> Tensor:
        """Candidates (N, M, ...) in the dtype of the images; the search itself is in float32 at least."""
        images = batch.images
        if starts is not None:
            starts = _checked_starts(starts, images, batch.target.bounds)
        if not bool(radius.any()):
            return images.unsqueeze(1).clone()
        center = images.to(torch.promote_types(images.dtype, torch.float32))
        ascent = Ascent(batch, center, radius, self._eot(batch, center), Best(center, self.keep), settled)
        length = 2.5 * radius / self.steps if self.step_size is None else torch.full_like(radius, self.step_size)
        lasts = [
            self._ascend(ascent, self._start(ascent, r, starts), [length] * self.steps) for r in range(self.restarts)
        ]
        if wanted := self._wanted_targets(ascent):
            run = partial(self._ascend, ascent)
            lasts.append(targeted_runs(ascent, run, lasts[-1], wanted, self.steps, self.norm))
        return rounded(torch.stack([*lasts, *ascent.best.images], 1), center.unsqueeze(1), images.dtype)

    def _ascend(self, ascent: Ascent, x: Tensor, lengths: list[Tensor], target: Tensor | None = None) -> Tensor:
        """One run from x (N, ...) in steps of lengths (N,), towards the classes target (N,) if given; its end."""
        batch, eot, active = ascent.batch, ascent.eot, ascent.active
        for length in lengths:
            # An image's draws are the same whatever other images need.
            draws = batch.fresh(EOT_CAP if self.eot == "auto" else int(self.eot))
            for count in sorted(set(eot[active].tolist())):
                for rows in (active & (eot == count)).nonzero().squeeze(1).split(CALL):
                    self._step(ascent, x, rows, length[rows], draws[:count], target)
        return x

    def _step(
        self, ascent: Ascent, x: Tensor, rows: Tensor, length: Tensor, draws: range, target: Tensor | None
    ) -> None:
        """Move some rows of x by one gradient step."""
        batch, before = ascent.batch, x[rows]
        loss = LOSSES[self.loss] if target is None else towards(target[rows].repeat(len(draws)))
        gradient, value, fooled = self._gradient(batch, before, rows, draws, loss)
        if target is None:
            ascent.best.offer(rows, before, value)
        climbed = before + spread(length, x).to(x.dtype) * steepest(gradient, self.norm)
        moved = project(climbed, ascent.center[rows], ascent.radius[rows], self.norm, batch.target.bounds)
        if self.early_stop:  # what surely fools the model is done; moving on could only lose it
            moved = torch.where(spread(ascent.leaves(before, rows, fooled), moved), before, moved)
        x[rows] = moved

    def _wanted_targets(self, ascent: Ascent) -> int:
        if self.targets == "auto":
            return 3 if ascent.knows and self.early_stop else 0
        return int(self.targets)

    def _start(self, ascent: Ascent, restart: int, starts: Tensor | None) -> Tensor:
        batch, center, radius = ascent.batch, ascent.center, ascent.radius
        if restart == 0:
            x = center if starts is None else starts.to(center)
        else:
            shape = tuple(center.shape[1:])
            offsets = [
                random_offset(shape, eps, self.norm, batch.generator(i, RESTART, restart))
                for i, eps in enumerate(radius.tolist())
            ]
            x = center + torch.stack(offsets).to(center)
        return project(x, center, radius, self.norm, batch.target.bounds)

    def _gradient(
        self, batch: Batch, x: Tensor, rows: Tensor, draws: range, loss: Loss
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Ascent direction (n, ...), mean loss (n,), and which rows are fooled in every draw, surely if one is all."""
        labels = batch.labels[rows].repeat(len(draws))
        with torch.enable_grad():
            # At what would be handed over: of a float16 image the search knows more than float16 holds.
            leaf = rounded(x, batch.images[rows], batch.images.dtype).to(x.dtype).requires_grad_()
            logits = batch.logits(leaf, rows, draws)
            weights, values = ascent_weights(logits, labels, loss, len(draws))
            known = logits.requires_grad
            gradient = torch.autograd.grad((weights * logits).sum(), leaf, allow_unused=True)[0] if known else None
        if gradient is None:
            warn(
                "the model's logits carry no gradient back to its images, so PGD tries its starting points only: "
                "remove no_grad or detach from the model, or use an attack that needs no gradient",
                stacklevel=4,
            )
            gradient = torch.zeros_like(x)
        batch.nonfinite[rows] |= ~torch.isfinite(gradient).flatten(1).all(1)
        value = values.view(len(draws), -1).mean(0)
        if batch.target.deterministic:
            return gradient, value, sure(logits.detach(), labels, getattr(batch.target, "rounding", ROUNDING))
        return gradient, value, wrong(logits.detach(), labels).view(len(draws), -1).all(0)

    def _eot(self, batch: Batch, center: Tensor) -> Tensor:
        """Draws to average for each image: (N,) int64."""
        eot = torch.ones_like(batch.ids)
        if self.eot != "auto":
            return eot * int(self.eot)
        if batch.target.deterministic:
            return eot
        draws = batch.fresh(2 * EOT_CAP)

        def direction(rows: Tensor, part: range) -> Tensor:
            return steepest(self._gradient(batch, center[rows], rows, part, LOSSES[self.loss])[0], "l2").flatten(1)

        count, rows = 1, torch.arange(len(eot), device=eot.device)
        first, second = direction(rows, draws[:1]), direction(rows, draws[1:2])
        while True:
            # Two zero halves (no gradient at all) would never agree.
            unsure = ((first * second).sum(1) < EOT_AGREEMENT) & (first.any(1) | second.any(1))
            rows = rows[unsure]
            if len(rows) == 0 or count >= EOT_CAP:
                return eot
            first = steepest(first[unsure] + second[unsure], "l2")
            count *= 2
            eot[rows] = count
            second = direction(rows, draws[count : 2 * count])


def sure(logits: Tensor, labels: Tensor, rounding: float) -> Tensor:
    """Wrong (N,) by more than another batch size, or the full precision of a verdict, could round away."""
    return margin(logits, labels) > rounding * (1 + logits.abs().amax(1))


def _sizes(eps: Any) -> Tensor:
    """One eps (), or one an image (N,): float64."""
    if eps is None:
        raise ValueError("expected eps, got None: PGD searches within a ball, so pass its radius, e.g. 8/255")
    if isinstance(eps, Tensor) and eps.dim() == 1:
        return torch.tensor([parse_epsilon(size) for size in eps.tolist()], dtype=torch.float64)
    return torch.tensor(parse_epsilon(eps), dtype=torch.float64)


def _radius(sizes: Tensor, images: Tensor) -> Tensor:
    """Eps of every image: (N,) float64."""
    if sizes.dim() and len(sizes) != len(images):
        raise ValueError(f"expected one eps or {len(images)}, one an image, got {len(sizes)}")
    return sizes.to(images.device).expand(len(images))


def _checked_starts(starts: Any, images: Tensor, bounds: tuple[float, float]) -> Tensor:
    x = torch.as_tensor(starts).detach()
    if x.shape != images.shape:
        raise ValueError(f"expected starts of the images' shape {tuple(images.shape)}, got {tuple(x.shape)}")
    check_starts(x, bounds)
    return x
