"""What an evaluation will cost, from one draw and one gradient measured on the spot."""

import resource
import sys
import time
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from jem_robust.evaluation.checks import probe
from jem_robust.evaluation.members import Member, descending, narrowed, resolve
from jem_robust.gradients import Spent
from jem_robust.images import check_images, check_labels
from jem_robust_attacks import PGD, Descent
from jem_robust_attacks.losses import margin
from jem_robust_attacks.norms import parse_norm
from jem_robust_attacks.target import Target, as_target
from jem_robust_attacks.targeted import targeted_steps

STANDING = 0.65  # share of images still worth attacking, on average over attacks and epsilons
IMPROVED = 0.6  # share of images whose candidate changes at an eps and has to be judged anew
EOT_GUESS = 4
NEARBY = 0.7  # share of images near enough to a boundary for targeted runs
DESCENT = 1.3  # attacks that fail, and cheap ones that do not, an image
# A toolkit's attack is run for two numbers of iterations on a few images, and a line drawn through its costs.
TOOLKIT_ITERATIONS = (2, 6)
TOOLKIT_IMAGES = 2


@dataclass(frozen=True)
class Cost:
    """Rows (forwards and backwards of the network) and seconds."""

    rows: float
    seconds: float

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.rows + other.rows, self.seconds + other.seconds)

    def times(self, factor: float) -> "Cost":
        """Cost of doing it `factor` times."""
        return Cost(self.rows * factor, self.seconds * factor)


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
    """Cost of the evaluation with these arguments, see `evaluate`; measures on the first `probe_images` images."""
    x = check_images(images, getattr(model, "input_shape", None))[:probe_images].to(getattr(model, "device", "cpu"))
    y = check_labels(labels, len(images), getattr(model, "num_classes", None))[:probe_images].to(x.device)
    if len(x) == 0:
        raise ValueError("expected at least one image, got none: check the data and the limit")
    target = as_target(model, x)
    probe(target, x, y, torch.arange(len(x), device=x.device), seed)  # says what is wrong with the model's output
    draw = _measured(model, len(x), lambda: _draw(target, x, seed))
    select, judge = (1, 1) if target.deterministic else (select_draws, draws)
    attacked = narrowed(model, precision)
    members = descending(resolve(attacks, attacked, x, parse_norm(norm, ("linf", "l2", "l0")), attack_chains), epsilons)
    per_eps = draw.times(judge * IMPROVED * len(members))
    total = draw.times(select + judge)
    for member in members:
        cost = _member_cost(model, member, x, y, seed, draw, select, max(epsilons))
        if member.minimizes:  # runs once, for all epsilons
            total += cost
        else:
            per_eps += cost.times(STANDING)
    total += per_eps.times(sum(eps > 0 for eps in epsilons))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Estimate(total.rows * len(images), total.seconds * len(images), peak, len(x))


def _member_cost(
    model: Any, member: Member, x: Tensor, y: Tensor, seed: int, draw: Cost, select: int, eps: float
) -> Cost:
    """Cost per image of one attack at one eps, its candidates' selection included."""
    attack = member.attack
    if isinstance(attack, Descent):
        return _pgd_cost(model, member, attack.attack, x, y, seed).times(DESCENT)
    if isinstance(attack, PGD):
        return _pgd_cost(model, member, attack, x, y, seed) + draw.times((attack.restarts + attack.keep) * select)
    if hasattr(attack, "toolkit"):
        return _toolkit_cost(model, member, x[:TOOLKIT_IMAGES], y[:TOOLKIT_IMAGES], seed, eps) + draw.times(select)
    return draw.times(getattr(attack, "max_queries", 1000) + select)


def _pgd_cost(model: Any, member: Member, attack: PGD, x: Tensor, y: Tensor, seed: int) -> Cost:
    certain = member.target.deterministic
    eot = (1 if certain else EOT_GUESS) if attack.eot == "auto" else int(attack.eot)
    targets = (3 if certain and attack.early_stop else 0) if attack.targets == "auto" else int(attack.targets)
    gradient = _measured(model, len(x), lambda: _gradient(member.target, x, y, seed))
    return gradient.times((attack.steps * attack.restarts + targeted_steps(attack.steps) * NEARBY * targets) * eot)


def _toolkit_cost(model: Any, member: Member, x: Tensor, y: Tensor, seed: int, eps: float) -> Cost:
    attack, radius = member.attack, None if member.minimizes else eps

    def cost(arguments: dict[str, Any]) -> Cost:
        tried = replace(attack, arguments={**attack.arguments, **arguments})
        return _measured(model, len(x), lambda: tried.search(member.target, x, y, radius, seed))

    few, more = TOOLKIT_ITERATIONS
    name, count = attack.loop or ("", 0)
    if count <= more:
        return cost({})
    try:
        short, longer = cost({name: few}), cost({name: more})
    except (ValueError, RuntimeError):  # too few iterations for it, unless the whole attack fails as well
        return cost({})
    return short + (longer + short.times(-1)).times((count - few) / (more - few))


def _measured(model: Any, count: int, work: Callable[[], object]) -> Cost:
    before = copy(getattr(model, "spent", Spent()))
    begin = time.perf_counter()
    work()
    seconds = time.perf_counter() - begin
    spent = getattr(model, "spent", Spent()).since(before)
    return Cost((spent.forwards + spent.backwards or count) / count, seconds / count)


def _draw(target: Target, x: Tensor, seed: int) -> Tensor:
    ids = torch.arange(len(x), device=x.device)
    with torch.no_grad():
        return target.draw(x, ids, torch.zeros_like(ids), "plain", seed)


def _gradient(target: Target, x: Tensor, y: Tensor, seed: int) -> Tensor:
    ids = torch.arange(len(x), device=x.device)
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(margin(target.draw(leaf, ids, torch.zeros_like(ids), "plain", seed), y).sum(), leaf)[0]
