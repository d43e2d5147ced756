"""What an evaluation will cost: the calls that a trial made, times what a draw and a gradient cost here."""

import resource
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from jem_robust.evaluation.checks import probe
from jem_robust.evaluation.members import Transfer, from_name, narrowed, resolve
from jem_robust.evaluation.prices import UNIT_IMAGES, Cost, Prices
from jem_robust.evaluation.trial import trial
from jem_robust.images import check_images, check_labels
from jem_robust_attacks import PGD
from jem_robust_attacks.norms import parse_norm
from jem_robust_attacks.target import as_target

TRIAL_IMAGES = 64  # at most, as the command line estimates
FEW = 4  # images of a first trial, which shows how many more can be tried
TRIAL_SECONDS = 20.0
RESTARTS = (1, 3)  # tried, and a line drawn through their costs, where more are wanted


@dataclass(frozen=True)
class Estimate:
    """rows: network forwards and backwards; seconds; memory: bytes of the process at its peak; probed: images tried."""

    rows: float
    seconds: float
    memory: int
    probed: int


def estimate(
    model: Any, images: Any, labels: Any, *, norm: str, epsilons: list[float], attacks: list[Any], draws: int,
    select_draws: int, seed: int, batch_size: int | None, attack_chains: int | None, probe_images: int,
    precision: str = "float32",
) -> Estimate:  # fmt: skip
    """Cost of the evaluation with these arguments, see `evaluate`; a trial takes up to `probe_images` images.

    The trial's chains are short: where only long ones withstand an attack, the estimate is too low.
    """
    x = check_images(images, getattr(model, "input_shape", None)).to(getattr(model, "device", "cpu"))
    y = check_labels(labels, len(x), getattr(model, "num_classes", None)).to(x.device)
    if len(x) == 0:
        raise ValueError("expected at least one image, got none: check the data and the limit")
    target = as_target(model, x)
    probe(target, x, y, torch.arange(len(x), device=x.device), seed)  # says what is wrong with the model's output
    attacks = [from_name(attack, norm) if isinstance(attack, str) else attack for attack in attacks]
    members = resolve(attacks, narrowed(model, precision), x, parse_norm(norm, ("linf", "l2", "l0")), attack_chains)
    measured = slice(min(probe_images, UNIT_IMAGES[1]))
    prices = Prices(model, target, members, x[measured], y[measured], seed, max(epsilons))
    arguments = {
        "norm": norm, "epsilons": epsilons, "draws": draws, "select_draws": select_draws, "seed": seed,
        "batch_size": batch_size, "precision": precision,
    }  # fmt: skip

    def total(count: int) -> Cost:
        some = torch.linspace(0, len(x) - 1, count, device=x.device).round().long()  # data may be sorted by class

        def cost(restarts: int) -> Cost:
            tried = [_limited(attack, restarts) for attack in attacks]
            return prices.of(trial(model, x[some], y[some], tried, **arguments), len(x) / count)

        few, more = RESTARTS
        wanted = max([few, *(getattr(_pgd(attack), "restarts", few) for attack in attacks)])
        return cost(wanted) if wanted <= more else cost(few).extended(cost(more), (wanted - few) / (more - few))

    count = min(FEW, probe_images, len(x))
    begin = time.perf_counter()
    found = total(count)
    affordable = int(count * TRIAL_SECONDS / (time.perf_counter() - begin))
    if (more := min(affordable, probe_images, len(x) // 2)) > count:
        count, found = more, total(more)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Estimate(found.rows, found.seconds, peak, count)


def _pgd(attack: Any) -> Any:
    return attack.attack if isinstance(attack, Transfer) else attack


def _limited(attack: Any, restarts: int) -> Any:
    """PGD with no more restarts, one draw a gradient where it chooses itself; other attacks as they are."""
    pgd = _pgd(attack)
    if not isinstance(pgd, PGD):
        return attack
    pgd = replace(pgd, restarts=min(pgd.restarts, restarts), eot=1 if pgd.eot == "auto" else pgd.eot)
    return Transfer(pgd) if isinstance(attack, Transfer) else pgd
