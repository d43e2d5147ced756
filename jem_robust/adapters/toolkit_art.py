"""ART's attacks as jobs. Written against ART 1.20.1."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from jem_robust.adapters.toolkit_jobs import (
    Job,
    adapter,
    is_attack,
    made,
    norm_argument,
    parameters,
    same_norm,
    step_length,
)

TARGETS_AS_Y = ("SaliencyMapMethod",)  # untargeted only without y
ONE_BY_ONE = ("ShadowAttack", "SimBA", "ZooAttack")  # fail on larger batches
PROBABILITIES = ("SimBA", "VirtualAdversarialMethod")  # refuse logits
FIXED_NORM = {"BasicIterativeMethod": "linf", "VirtualAdversarialMethod": "l2", "ThresholdAttack": "linf"}


def art_attacks() -> dict[str, Any]:
    """ART's evasion attacks that can run on a PyTorch classifier of images."""
    classifier = adapter("art").JEMARTClassifier

    from art.attacks import evasion
    from art.attacks.attack import EvasionAttack

    def fits(attack: Any) -> bool:
        needed = attack._estimator_requirements or ()
        options = (need if isinstance(need, tuple) else (need,) for need in needed)
        return bool(needed) and all(any(o in classifier.__mro__ for o in option) for option in options)

    return {name: c for name, c in vars(evasion).items() if is_attack(c, EvasionAttack) and fits(c)}


def run_art(attack: Any, job: Job) -> Tensor:
    """ART attacks numpy images; eps, eps_step, norm, th and batch_size are passed where the attack takes them.

    The classifier computes losses itself, so that EOT averages gradients there, and not logits in the module. But where
    a loss_type is given, ART 1.20.1 attacks that module in a classifier of its own making.
    """
    takes, name = parameters(attack), attack.__name__
    size = 1 if name in ONE_BY_ONE else len(job.images)
    offered: dict[str, Any] = {"verbose": False, "batch_size": size, "targeted": False}
    if "norm" in takes and not isinstance(takes["norm"].default, str):  # Wasserstein's norm is a word
        offered["norm"] = norm_argument({"linf": np.inf, "l2": 2}, job.norm, attack)
    if "eps" in takes:
        same_norm(attack, job, FIXED_NORM.get(name, job.norm))
        offered["eps"] = eps = job.needed_eps()
        offered["eps_step"] = step_length(attack, job, eps, "max_iter")
    if "th" in takes and job.eps is not None:  # in steps of 1/255 for ThresholdAttack, pixels for PixelAttack
        offered["th"] = max(1, round(job.eps * (1 if job.norm == "l0" else 255)))
    job.module.probabilities = name in PROBABILITIES
    shape = tuple(job.images.shape[1:])
    eot = 1 if name == "AutoAttack" or job.arguments.get("loss_type") else job.module.eot
    job.module.eot //= eot
    classifier = adapter("art").JEMARTClassifier(job.module, input_shape=shape, nb_classes=job.classes, eot=eot)
    built = made(attack, job, classifier, **offered)
    x = job.images.float().cpu().numpy()
    hot = np.eye(job.classes, dtype=np.float32)[job.labels.cpu().numpy()]
    parts = [slice(i, i + size) for i in range(0, len(x), size)]
    found = [built.generate(x=x[p], y=None if name in TARGETS_AS_Y else hot[p]) for p in parts]
    return torch.as_tensor(np.concatenate([np.asarray(f) for f in found]))
