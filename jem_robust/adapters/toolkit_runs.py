"""Foolbox's, torchattacks' and AutoAttack's attacks as jobs, and the table of all toolkits.

Written against Foolbox 3.3.4 and torchattacks 3.5.1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from jem_robust.adapters.toolkit_art import art_attacks, run_art
from jem_robust.adapters.toolkit_jobs import (
    Job,
    RefusedError,
    adapter,
    is_attack,
    made,
    norm_argument,
    parameters,
    same_norm,
    step_length,
)

# Foolbox


def foolbox_attacks() -> dict[str, Any]:
    """Foolbox's attacks, its short names (PGD, FGSM...) included."""
    adapter("foolbox")

    from foolbox import attacks
    from foolbox.attacks.base import Attack

    return {name: c for name, c in vars(attacks).items() if is_attack(c, Attack)}


def run_foolbox(attack: Any, job: Job) -> Tensor:
    """Attacks of fixed size get eps, others search for the smallest. Images where no start was found stay as they are.

    Foolbox 3.3.4: attacks that start from an adversarial image give up the whole batch where one start fails (by
    ValueError in BoundaryAttack, by a bare assert in PointwiseAttack), so the images are then attacked one by one.
    """
    from foolbox.attacks.base import FixedEpsilonAttack
    from foolbox.distances import LpDistance

    order = {"linf": np.inf, "l2": 2, "l0": 0}[job.norm]
    offered: dict[str, Any] = {"distance": LpDistance(order)}
    if "steps" in job.arguments and "abs_stepsize" not in job.arguments:
        offered["rel_stepsize"] = step_length(attack, job, 1.0, "steps")  # its default fits its default steps
    built = made(attack, job, **offered)
    model = adapter("foolbox").FoolboxModel(job.module)
    fixed = isinstance(built, FixedEpsilonAttack)
    if fixed:
        same_norm(attack, job, {np.inf: "linf", 2: "l2", 1: "l1", 0: "l0"}.get(built.distance.p, str(built.distance)))
    extra = {"epsilons": job.needed_eps() if fixed else None}

    def perturbed(images: Tensor, labels: Tensor) -> Tensor:
        return built(model, images, labels, **extra)[1]  # type: ignore[no-any-return]

    starts = hasattr(built, "init_attack")
    try:
        return perturbed(job.images, job.labels)
    except (ValueError, AssertionError) as error:
        if not starts or (isinstance(error, ValueError) and "init_attack failed" not in str(error)):
            raise
    result = job.images.clone()
    for i in range(len(result)):
        try:
            result[i : i + 1] = perturbed(job.images[i : i + 1], job.labels[i : i + 1])
        except (ValueError, AssertionError):
            continue
    return result


# torchattacks

TORCHATTACKS_L2 = ("PGDL2", "PGDRSL2")
TORCHATTACKS_RGB = ("TIFGSM", "PIFGSM", "PIFGSMPP")  # their kernels are written for 3 channels


def torchattacks_attacks() -> dict[str, Any]:
    """torchattacks' attacks."""
    adapter("torchattacks")

    import torchattacks

    return {name: getattr(torchattacks, name) for name in torchattacks.__all__}


def run_torchattacks(attack: Any, job: Job) -> Tensor:
    """eps (or max_epsilon), alpha, norm, n_classes and seed are passed where the attack takes them."""
    takes, channels = parameters(attack), job.images.shape[1]
    if attack.__name__ in TORCHATTACKS_RGB and channels != 3:
        raise RefusedError(
            f"expected images of 3 channels, got {channels}: {attack.__name__} blurs RGB; use MIFGSM or PGD"
        )
    offered: dict[str, Any] = {"n_classes": job.classes, "seed": job.seed % 2**31, "verbose": False}
    if "norm" in takes:
        offered["norm"] = norm_argument({"linf": "Linf", "l2": "L2"}, job.norm, attack)
    name = next((n for n in ("eps", "max_epsilon") if n in takes), None)
    if name is not None:
        if "norm" not in takes:
            same_norm(attack, job, "l2" if attack.__name__ in TORCHATTACKS_L2 else "linf")
        offered[name] = eps = job.needed_eps()
        offered["alpha"] = step_length(attack, job, eps, "steps")
    built = made(attack, job, job.module, **offered)
    if attack.__name__ == "JSMA":
        # torchattacks 3.5.1 aims at class (label + 1) % 10 however many classes there are.
        built.set_mode_targeted_by_function(lambda images, labels: (labels + 1) % job.classes, quiet=True)
    result: Tensor = built(job.images, job.labels)
    return result


# AutoAttack


def autoattack_attacks() -> dict[str, Any]:
    """Its version for random models."""
    from jem_robust.adapters.autoattack import find_backend, perturb

    find_backend()

    def rand(iterations: int = 100, eot_iter: int = 20, backend: str | None = None) -> Callable[..., Tensor]:
        return lambda job: perturb(
            job.module, job.images, job.labels, job.needed_eps(), job.norm, job.seed % 2**31, iterations, eot_iter,
            backend, job.classes,
        )  # fmt: skip

    return {"rand": rand}


def run_autoattack(attack: Any, job: Job) -> Tensor:
    """linf and l2 only."""
    norm_argument({"linf": 1, "l2": 1}, job.norm, attack)
    result: Tensor = attack(**job.arguments)(job)
    return result


@dataclass(frozen=True)
class Toolkit:
    """names(): attacks by name (raises ImportError with the remedy). run(attack, job): adversarial images.

    minimizes(attack): whether it looks for the smallest perturbation rather than within eps.
    """

    names: Callable[[], dict[str, Any]]
    run: Callable[[Any, Job], Tensor]
    minimizes: Callable[[Any], bool]


def _takes_no_size(attack: Any) -> bool:
    return not parameters(attack).keys() & {"eps", "max_epsilon", "th"}


def _is_minimization(attack: Any) -> bool:
    from foolbox.attacks.base import MinimizationAttack

    return issubclass(attack, MinimizationAttack)


TOOLKITS = {
    "art": Toolkit(art_attacks, run_art, _takes_no_size),
    "foolbox": Toolkit(foolbox_attacks, run_foolbox, _is_minimization),
    "torchattacks": Toolkit(torchattacks_attacks, run_torchattacks, _takes_no_size),
    "autoattack": Toolkit(autoattack_attacks, run_autoattack, lambda attack: False),
}
