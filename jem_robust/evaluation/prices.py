"""What draws, gradients and toolkits' attacks of a model cost, measured on the spot."""

import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jem_robust.evaluation.members import Member
from jem_robust.evaluation.trial import Counted, Trial
from jem_robust.gradients import Spent
from jem_robust_attacks import PGD
from jem_robust_attacks.target import Target

UNIT_IMAGES = (2, 64)  # calls of these sizes are timed: a call costs something whatever its size
REPEATS = 3
# A toolkit's attack is run for two numbers of iterations, and a line drawn through its costs,
TOOLKIT_ITERATIONS = (2, 6)
TOOLKIT_IMAGES = (2, 16)  # on so many images, on more of them only where few took
TOOLKIT_SECONDS = 2.0  # no longer
EOT_IMAGES = 4  # on which the draws a gradient needs are found out


@dataclass(frozen=True)
class Cost:
    """Rows (forwards and backwards of the network) and seconds."""

    rows: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.rows + other.rows, self.seconds + other.seconds)

    def times(self, factor: float) -> "Cost":
        """Cost of doing it `factor` times."""
        return Cost(self.rows * factor, self.seconds * factor)

    def extended(self, longer: "Cost", factor: float) -> "Cost":
        """On the straight line through this cost, at 0, and a longer one, at 1."""
        return self.times(1 - factor) + longer.times(factor)


@dataclass(frozen=True)
class Unit:
    """Cost of an image in a large call, and seconds of a call on top."""

    image: Cost
    call: float

    def of(self, calls: Sequence[int], scale: float) -> Cost:
        """Cost of calls of so many images, each `scale` times as large, but no larger than those measured."""
        sizes = [rows * scale for rows in calls]
        count = sum(max(1.0, size / UNIT_IMAGES[1]) for size in sizes)
        return self.image.times(sum(sizes)) + Cost(0, self.call * count)


Price = Callable[[Counted, int, float], Cost]  # of an attack: calls in a trial, images asked of a toolkit's, scale


class Prices:
    """Of a model, judged as `target`, under the attacks of `members`, measured on images x (N, ...) of labels y (N,).

    eps: at which attacks are tried.
    """

    def __init__(
        self, model: Any, target: Target, members: Sequence[Member], x: Tensor, y: Tensor, seed: int, eps: float
    ) -> None:
        self._model, self._x, self._y, self._seed = model, x, y, seed
        self._judged = self._unit(partial(_draw, target))
        self._attacks = [
            (self._toolkit if hasattr(member.attack, "toolkit") else self._own)(member, eps) for member in members
        ]

    def of(self, trial: Trial, scale: float) -> Cost:
        """Cost of the whole evaluation, of whose images, `scale` times as many, this was a trial."""
        cost = self._judged.of(trial.judged.draws, scale)
        for price, counted, asked in zip(self._attacks, trial.attacked, trial.asked, strict=True):
            cost += price(counted, asked, scale)
        return cost

    def _own(self, member: Member, eps: float) -> Price:
        draw, attack = self._unit(partial(_draw, member.target)), member.attack
        if not isinstance(attack, PGD):
            return lambda counted, _, scale: draw.of(counted.draws, scale) + Cost(0, counted.between * scale)
        gradient, eot = self._unit(partial(_iteration, attack, member.target, eps)), self._eot(attack, member.target)
        return lambda counted, _, scale: draw.of(counted.draws, scale) + gradient.of(counted.gradients, scale * eot)

    def _eot(self, attack: PGD, target: Target) -> float:
        """Draws that a gradient takes of the model for one that it took in the trial."""
        if attack.eot != "auto":
            return 1.0
        draws = attack.draws_needed(target, self._x[:EOT_IMAGES], self._y[:EOT_IMAGES], self._seed)
        return float(draws.double().mean()) * (1 + 2 / attack.steps)  # to find out takes twice as many, once

    def _toolkit(self, member: Member, eps: float) -> Price:
        few, many = (min(count, len(self._x)) for count in TOOLKIT_IMAGES)
        begin = time.perf_counter()
        found = self._toolkit_cost(member, eps, few).times(1 / few)
        if many > few and time.perf_counter() - begin < TOOLKIT_SECONDS:
            found = self._toolkit_cost(member, eps, many).times(1 / many)
        return lambda _, asked, scale: found.times(asked * scale)

    def _toolkit_cost(self, member: Member, eps: float, count: int) -> Cost:
        """Cost of an attack on some images."""
        x, y = self._x[:count], self._y[:count]
        attack, radius = member.attack, None if member.minimizes else eps

        def cost(**arguments: Any) -> Cost:
            tried = replace(attack, arguments={**attack.arguments, **arguments})
            return self._measured(lambda: tried.search(member.target, x, y, radius, self._seed), len(x))

        few, more = TOOLKIT_ITERATIONS
        name, iterations = attack.loop or ("", 0)
        if iterations <= more:
            return cost()
        try:
            return cost(**{name: few}).extended(cost(**{name: more}), (iterations - few) / (more - few))
        except (ValueError, RuntimeError):  # too few iterations for it, unless the whole attack fails as well
            return cost()

    def _unit(self, work: Callable[[Tensor, Tensor, int], object]) -> Unit:
        """Of work on images (n, ...), labels (n,) and a seed."""
        few, most = UNIT_IMAGES
        many = min(most, len(self._x))

        def cost(count: int) -> Cost:
            x, y = self._x[:count], self._y[:count]
            tried = [self._measured(lambda: work(x, y, self._seed), count) for _ in range(REPEATS)]
            return sorted(tried, key=lambda one: one.seconds)[REPEATS // 2]

        small, large = cost(min(few, many)), cost(many)
        slope = (large.seconds - small.seconds) / (many - few) if many >= 2 * few else large.seconds / many
        return Unit(Cost(large.rows / many, slope), max(0.0, small.seconds - few * slope))

    def _measured(self, work: Callable[[], object], count: int) -> Cost:
        """count: rows of a model that does not say."""
        before = copy(getattr(self._model, "spent", Spent()))
        begin = time.perf_counter()
        work()
        seconds = time.perf_counter() - begin
        spent = getattr(self._model, "spent", Spent()).since(before)
        return Cost(spent.forwards + spent.backwards or count, seconds)


def _draw(target: Target, x: Tensor, y: Tensor, seed: int) -> Tensor:
    ids = torch.arange(len(x), device=x.device)
    with torch.no_grad():
        return target.draw(x, ids, torch.zeros_like(ids), "plain", seed)


def _iteration(attack: PGD, target: Target, eps: float, x: Tensor, y: Tensor, seed: int) -> object:
    """One gradient and what an attack does with it."""
    return replace(attack, steps=1, restarts=1, eot=1, targets=0).search(target, x, y, eps, seed)
