"""What toolkits' attacks are asked to do: the job, and how its settings become an attack's arguments.

A run gets a Draws module, images (N, C, H, W) in [0, 1], labels (N,), eps (None: unlimited) in the same units, and
returns images as the toolkit leaves them, unchecked. It is called within isolation.isolated.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor

from jem_robust.adapters.guard import Draws

# Step length in units of eps: 2.5 eps / iterations as in our PGD. The automatic ones shorten an initial step of 2 eps.
STEP = 2.5
AUTOMATIC_STEP = 2.0
AUTOMATIC = ("Auto", "Rescaling")


class RefusedError(ValueError):
    """The attack does not fit the evaluation."""


@dataclass(frozen=True)
class Job:
    """One attack to run: `arguments` are the user's, `norm` one of linf, l2, l0."""

    module: Draws
    images: Tensor
    labels: Tensor
    eps: float | None
    norm: str
    arguments: Mapping[str, Any]
    classes: int
    seed: int

    def needed_eps(self) -> float:
        """eps; RefusedError without one."""
        if self.eps is None:
            raise RefusedError(
                "expected eps, got None: this attack searches within a ball; pass its radius, e.g. 8/255"
            )
        return self.eps


def parameters(attack: Any) -> dict[str, inspect.Parameter]:
    """The named parameters of an attack's constructor, without self and the model."""
    found = inspect.signature(attack).parameters.values()
    named = (p for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return {p.name: p for p in named if p.name not in ("model", "estimator", "classifier")}


def filled(attack: Any, job: Job, offered: dict[str, Any]) -> dict[str, Any]:
    """The user's arguments and whatever of `offered` the attack takes and the user left out."""
    takes = parameters(attack)
    return {**{k: v for k, v in offered.items() if k in takes}, **job.arguments}


def step_length(attack: Any, job: Job, eps: float, iterations: str) -> float:
    """The step of an iterative attack for this eps; its own default is made for one eps only."""
    if attack.__name__.startswith(AUTOMATIC):
        return AUTOMATIC_STEP * eps
    takes = parameters(attack)
    count = job.arguments.get(iterations, takes[iterations].default if iterations in takes else 1)
    return STEP * eps / count if count > STEP else eps


def adapter(name: str) -> Any:
    """Our adapter for a toolkit; its ImportError says how to install the toolkit."""
    return import_module(f"jem_robust.adapters.{name}")


def is_attack(candidate: Any, base: type) -> bool:
    """Whether candidate is a class derived from base that can be made."""
    return inspect.isclass(candidate) and issubclass(candidate, base) and not inspect.isabstract(candidate)


def same_norm(attack: Any, job: Job, norm: str) -> None:
    """RefusedError where the attack's eps is in another norm than the evaluation's."""
    if norm != job.norm:
        raise RefusedError(f"expected an attack in {job.norm}, got {attack.__name__}, whose eps is in {norm}")


def norm_argument(choices: dict[str, Any], norm: str, attack: Any) -> Any:
    """What the attack calls the norm; RefusedError for a norm it does not have."""
    if norm not in choices:
        raise RefusedError(f"expected a norm out of {list(choices)} for {attack.__name__}, got {norm!r}")
    return choices[norm]
