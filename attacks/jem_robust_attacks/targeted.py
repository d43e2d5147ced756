"""Short runs towards other classes, on what an attack left standing but not far (after Croce & Hein 2020)."""

from collections.abc import Callable

import torch
from torch import Tensor

from jem_robust_attacks.ascent import Ascent
from jem_robust_attacks.losses import towards
from jem_robust_attacks.norms import spread

TARGETED = 0.25  # of the iterations: what a targeted run takes,
TARGETED_LEAST = 10  # but no fewer than these, or all
NEAR = 0.4  # of an image's margin: with more left targeted runs were never seen to help,
NEARER = 0.1  # nor to go on with after half their iterations
RANKED_CLASSES = 5  # classes whose boundary is measured, by one gradient each, to choose targets
Run = Callable[[Tensor, list[Tensor], Tensor], Tensor]  # x (N, ...), lengths of its steps, classes (N,) -> its end


def targeted_steps(steps: int) -> int:
    """Iterations of a targeted run where others take `steps`."""
    return min(steps, max(round(TARGETED * steps), TARGETED_LEAST))


def targeted_runs(ascent: Ascent, run: Run, last: Tensor, wanted: int, steps: int, norm: str) -> Tensor:
    """Runs from where the last one ended (N, ...), towards `wanted` classes in turn; the best of their ends (N, ...).

    Where it comes out which images are fooled, those that are not near are left, and a run that stays far as well.
    """
    active, x, held = ascent.active, last.clone(), ascent.margins(last)
    own = ascent.margins(ascent.center) if ascent.knows else torch.full_like(held, -torch.inf)
    if ascent.knows:
        active &= (held >= NEAR * own) & (held <= 0)
    count = targeted_steps(steps)
    lengths = [ascent.radius * (1 - t / count) for t in range(count)]  # across the ball first, then with care
    half = -(-count // 2)
    for target in nearest_classes(ascent, wanted, norm):
        standing = active.clone()
        tried = run(last.clone(), lengths[:half], target)
        left = active & (ascent.margins(tried) < NEARER * own)
        active &= ~left
        tried = run(tried, lengths[half:], target)
        active |= left
        now = ascent.margins(tried)
        better = standing & (~active | (now > held))
        x, held = torch.where(spread(better, x), tried, x), torch.where(better, now, held)
        rows = active.nonzero().squeeze(1)
        ascent.confirmed(tried[rows], rows, now[rows] > 0)
    return x


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
