"""A small trial of an evaluation: real attacks and verdicts on few images and short chains, to count what they ask for.

How many images stand, and for how long, cannot be known without attacking. One chain of one step shows it for a
fraction of the cost; what a draw and a gradient of the model itself cost is measured apart (`estimate`).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, is_grad_enabled

from jem_robust.evaluation.robustness import Evaluation
from jem_robust_attacks import PGD
from jem_robust_attacks.target import Target


@dataclass(eq=False)
class Counted:
    """A target that notes how many rows every call has, of draws and of those that are differentiated.

    latest: the counted target of a trial that was called last. between: seconds from one of its calls to the next.
    """

    target: Target
    latest: "list[Counted]"
    draws: list[int] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)
    between: float = 0.0
    _left: float = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def draw(self, images: Tensor, image_ids: Tensor, draw_ids: Tensor, purpose: str, seed: int) -> Tensor:
        """The target's."""
        if self.latest[-1:] == [self]:
            self.between += time.perf_counter() - self._left
        (self.gradients if is_grad_enabled() and images.requires_grad else self.draws).append(len(images))
        logits = self.target.draw(images, image_ids, draw_ids, purpose, seed)
        self.latest[:], self._left = [self], time.perf_counter()
        return logits


@dataclass
class StandIn:
    """What a trial runs in place of a toolkit's attack, whose cost is measured apart: ten iterations of PGD.

    images: how many it was given, over all epsilons.
    """

    norm: str
    images: int = 0

    def search(
        self, model: Any, images: Tensor, labels: Tensor, eps: float, seed: int, ids: Tensor, starts: Tensor,
        report: Callable[[int], None],
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Candidates (N, M, C, H, W), the images themselves in norms that PGD does not know."""
        self.images += len(images)
        if self.norm not in ("linf", "l2"):
            return images.unsqueeze(1), None
        return PGD(self.norm, steps=10, eot=1).search(model, images, labels, eps, seed, ids, starts, report)


@dataclass(frozen=True)
class Trial:
    """Calls of the judged model and of each attack's target; images that each attack of a toolkit was given."""

    judged: Counted
    attacked: list[Counted]
    asked: list[int]


def trial(model: Any, images: Tensor, labels: Tensor, attacks: list[Any], **arguments: Any) -> Trial:
    """Run the evaluation with these arguments (see `evaluate`) on short chains; attacks of toolkits by a stand-in."""
    norm = arguments["norm"]
    ours = [StandIn(norm) if hasattr(attack, "toolkit") else attack for attack in attacks]
    run = Evaluation(shortened(model), images, labels, attacks=ours, attack_chains=None, **arguments)
    latest: list[Counted] = []
    judged = Counted(run.target, latest)
    # What the contest did in the beginning, on the images themselves.
    judged.draws.append(len(images) * (run.draws + run.select_draws))
    run.contest.target = judged
    counted = [Counted(member.target, latest) for member in run.members]
    run.members = [replace(member, target=c) for member, c in zip(run.members, counted, strict=True)]
    for eps in run.remaining():
        run.at(eps)
    # Attacks that look for the smallest distance are run on all images, once.
    once = [getattr(attack, "minimizes", False) for attack in attacks]
    asked = [len(images) if o else getattr(a, "images", 0) for o, a in zip(once, ours, strict=True)]
    return Trial(judged, counted, asked)


def shortened(model: Any) -> Any:
    """A view with one chain of at most one step, where the model has chains."""
    if not hasattr(model, "with_refinement"):
        return model
    return model.with_refinement(steps=min(model.refinement.steps, 1), chains=1)
