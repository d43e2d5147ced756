"""What toolkits' attacks are asked to do: the job, and how its settings become an attack's arguments.

A run gets a Draws module, images (N, C, H, W) in [0, 1], labels (N,), eps (None: unlimited) in the same units, and
returns images as the toolkit leaves them, unchecked. It is called within isolation.isolated.
"""

import inspect
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor

from jem_robust.adapters.guard import Draws

OURS = ("eps", "max_epsilon", "norm", "distance", "targeted")  # decided by the evaluation, not by an argument

# Step length in units of eps: 2.5 eps / iterations as in our PGD. The automatic ones shorten an initial step of 2 eps.
STEP = 2.5
AUTOMATIC_STEP = 2.0
AUTOMATIC = ("Auto", "Rescaling")

# Attacks that cannot be judged here, and why.
PATCH = "it makes one patch for all images, which no eps bounds"
TARGET = "it only looks for a given class or image, and the evaluation is untargeted"
VIDEO = "it changes frames of videos"
TENSORFLOW = "it runs on TensorFlow"
COLLECTION = "it needs more models, or images to train them on, than an evaluation has"
REFUSED = {
    "art:AdversarialPatch": PATCH, "art:AdversarialPatchNumpy": PATCH, "art:AdversarialPatchPyTorch": PATCH,
    "art:AdversarialPatchTensorFlowV2": PATCH, "art:FeatureAdversariesNumpy": TARGET,
    "art:FeatureAdversariesPyTorch": TARGET, "art:FeatureAdversariesTensorFlowV2": TARGET,
    "art:FrameSaliencyAttack": VIDEO, "art:GRAPHITEBlackbox": TARGET, "art:GRAPHITEWhiteboxPyTorch": TARGET,
    "art:GeoDA": "ART 1.20.1 calls np.mat for it, which NumPy 2 removed", "art:LowProFool": "it changes tables",
    "art:MalwareGDTensorFlow": "it changes programs", "art:OverTheAirFlickeringPyTorch": VIDEO,
    "art:ProjectedGradientDescentTensorFlowV2": TENSORFLOW, "art:TargetedUniversalPerturbation": TARGET,
    "foolbox:BinarizationRefinementAttack": "it only refines what an earlier attack found",
    "foolbox:DatasetAttack": "it needs other images to be fed to it", "foolbox:GenAttack": TARGET,
    "torchattacks:LGV": COLLECTION, "torchattacks:MultiAttack": COLLECTION,
    "torchattacks:VANILA": "it returns the images as they are",
}  # fmt: skip
INSTEAD = {
    "art": "art:ProjectedGradientDescent, art:DeepFool or art:SquareAttack",
    "foolbox": "foolbox:LinfPGD, foolbox:L2DeepFoolAttack or foolbox:BoundaryAttack",
    "torchattacks": "torchattacks:PGD, torchattacks:DeepFool or torchattacks:Square",
}
NEEDED = {"art:SpatialTransformation": ("max_translation", "max_rotation")}  # one of them, or it changes nothing
# Parameters without which nothing happens, or the reverse, when they are 0 or less.
POSITIVE = re.compile("step|iter|quer|restart|repeat|trial|directions|sample|alpha|^lr$|learning_rate|std")
REAL = ("c", "kappa", "lam", "nsig", "scale")  # torchattacks annotates nothing, and their defaults are whole
LOOPS = ("max_iter", "max_iterations", "steps", "nb_steps", "iterations", "n_queries", "nb_iter", "num_iter_set")


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


def check_arguments(label: str, attack: Any, arguments: Mapping[str, Any]) -> None:
    """ValueError for arguments the attack cannot use, which many attacks do not check, and for missing ones."""
    takes = parameters(attack)
    needs = [[name] for name, p in takes.items() if p.default is p.empty]
    needs += [list(NEEDED[label])] if label in NEEDED else []
    for names in needs:
        if not any(arguments.get(name) for name in names):
            raise ValueError(f"{label} needs {' or '.join(names)}: pass e.g. --attack-arg {names[0]}=5")
    for name, value in arguments.items():
        wanted = _wanted(takes[name], value)
        if wanted:
            raise ValueError(f"{label}: expected {name} {wanted}, got {value!r}; it takes {defaults(attack)}")


def _wanted(parameter: inspect.Parameter, value: Any) -> str | None:
    """What a parameter's value should be, None if it is."""
    note, default = parameter.annotation, parameter.default
    text = note if isinstance(note, str) else inspect.formatannotation(note)
    if note is parameter.empty:
        text = "float" if parameter.name in REAL else type(default).__name__
    if choices := re.findall(r"Literal\['(\w+)'\]", text):
        return None if value in choices else f"out of {', '.join(choices)}"
    kinds = set(re.findall(r"\w+", text)) - {"typing", "Optional", "Union", "None"}
    if (value is None and (default is None or "Optional" in text)) or not kinds <= {"bool", "int", "float"}:
        return None
    positive = bool(POSITIVE.search(parameter.name)) and (not isinstance(default, int | float) or default > 0)
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kinds == {"bool"}:
        return None if isinstance(value, bool) else "to be true or false"
    if kinds == {"int"}:
        least = 1 if positive else 0 if default == 0 else -math.inf
        right = number and isinstance(value, int) and value >= least
        return None if right else "to be a whole number" + (f" from {least} up" if least >= 0 else "")
    return None if number and (value > 0 or not positive) else "to be a number" + " above 0" * positive


def defaults(attack: Any) -> str:
    """The attack's parameters as a user may pass them: max_iter=100, ..."""
    return ", ".join(
        f"{name}={'...' if p.default is p.empty else p.default}"
        for name, p in parameters(attack).items()
        if name not in OURS
    )


def made(attack: Any, job: Job, *model: Any, **offered: Any) -> Any:
    """The attack itself; RefusedError for arguments that its constructor refuses."""
    try:
        return attack(*model, **filled(attack, job, offered))
    except ImportError:
        raise
    except Exception as error:
        raise RefusedError(
            f"expected arguments that {attack.__name__} takes ({error}), got {dict(job.arguments)}; "
            f"it takes {defaults(attack)}"
        ) from error


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
