"""Attacks of other toolkits behind our attack protocol, so that they are judged by our verdict."""

from ast import literal_eval
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jem_robust.adapters.guard import Draws, check_eot
from jem_robust.adapters.isolation import isolated
from jem_robust.adapters.toolkit_jobs import (
    INSTEAD,
    LOOPS,
    OURS,
    REFUSED,
    Job,
    RefusedError,
    check_arguments,
    defaults,
    parameters,
)
from jem_robust.adapters.toolkit_runs import TOOLKITS
from jem_robust_attacks.batch import Batch, Report
from jem_robust_attacks.norms import NORMS, distance, parse_epsilon, parse_norm, project, spread
from jem_robust_attacks.result import AttackResult

CONFIRM_DRAWS = 10
SEED_WORD = 0x70017
UNCHANGED = 1e-6


class ToolkitError(RuntimeError):
    """A toolkit's own code raised an error."""


@dataclass(frozen=True)
class ToolkitAttack:
    """An attack of ART, Foolbox, torchattacks or AutoAttack, untargeted, on any callable images -> logits.

    toolkit, name: "art", "ProjectedGradientDescent". norm: "linf", "l2", or "l0" for attacks on few pixels. arguments:
    of the attack's constructor; eps and norm come from the evaluation, step sizes left out follow eps. eot: draws
    averaged for a gradient: ART's gradients of the loss, but the logits for the others, who apply their loss themselves
    (torchattacks:EOTPGD averages gradients).

    Results are projected into the norm's ball and the box. Noise is keyed by (seed, image ids), and global random
    numbers are seeded from them and restored, so the same call gives the same result. But toolkits draw for a batch at
    a time and do not say for which images, so that results depend on its size and the images in it; one image a call
    depends on nothing else and takes 2 to 6 times as long on a CPU. `starts` is ignored: toolkits start as they do.
    Raises ImportError naming what to install, ValueError for unknown names (near matches listed), arguments, and
    attacks that cannot be judged, ToolkitError for what fails in the toolkit.
    """

    toolkit: str
    name: str
    norm: str = "linf"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    eot: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", parse_norm(self.norm, NORMS))
        object.__setattr__(self, "arguments", dict(self.arguments))
        check_eot(self.eot)
        takes = parameters(self._attack())
        for name in self.arguments:
            if name in OURS:
                raise ValueError(f"expected no argument {name}: it comes from the evaluation's own norm and epsilons")
            if name not in takes:
                raise ValueError(f"{self.label} takes no argument {name!r}; {_near(name, takes)}")
        check_arguments(self.label, self._attack(), self.arguments)

    @property
    def label(self) -> str:
        """What parse_attack reads."""
        return f"{self.toolkit}:{self.name}"

    @property
    def minimizes(self) -> bool:
        """Whether the attack looks for the smallest perturbation once, rather than within a given eps."""
        return TOOLKITS[self.toolkit].minimizes(self._attack())

    @property
    def takes(self) -> list[str]:
        """Names of the arguments it takes."""
        return [name for name in parameters(self._attack()) if name not in OURS]

    @property
    def loop(self) -> tuple[str, int] | None:
        """The argument that counts its iterations, and how many it makes."""
        takes = parameters(self._attack())
        name = next((name for name in LOOPS if name in takes), None)
        return (name, self.arguments.get(name, takes[name].default)) if name else None

    def _attack(self) -> Any:
        if self.toolkit not in TOOLKITS:
            raise ValueError(f"unknown toolkit {self.toolkit!r}; {_near(self.toolkit, TOOLKITS)}")
        if self.label in REFUSED:
            raise ValueError(f"{self.label} cannot be used here: {REFUSED[self.label]}; use {INSTEAD[self.toolkit]}")
        attacks = TOOLKITS[self.toolkit].names()
        if self.name not in attacks:
            usable = [name for name in attacks if f"{self.toolkit}:{name}" not in REFUSED]
            raise ValueError(f"{self.toolkit} has no attack {self.name!r} for images; {_near(self.name, usable)}")
        return attacks[self.name]

    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(
        self, model: Any, images: Any, labels: Any, eps: Any = None, seed: int = 0, image_ids: Any = None,
        starts: Tensor | None = None, progress: Report | None = None,
    ) -> AttackResult:  # fmt: skip
        """Attack images (N, C, H, W) of true labels (N,); success is our majority verdict on fresh draws."""
        batch = Batch.of(model, images, labels, seed, image_ids, progress)
        candidates, nonfinite = self._perturb(batch, eps)
        rows = torch.arange(len(batch.images), device=batch.images.device)
        begin = batch.next_draw
        clean = batch.shares(batch.images, rows, CONFIRM_DRAWS)[0]
        batch.next_draw = begin  # both on the same noise
        moved = batch.shares(candidates[:, 0], rows, CONFIRM_DRAWS)[0]
        # An image that is wrong as it is needs no attack, and is not robust.
        better = spread((clean < 0.5) & (moved > clean), batch.images)
        chosen = torch.where(better, candidates[:, 0], batch.images)
        success = batch.shares(chosen, rows, CONFIRM_DRAWS)[0] >= 0.5
        adversarials = torch.where(spread(success, chosen), chosen, batch.images)
        distances = torch.where(success, distance(adversarials, batch.images, self.norm), torch.inf)
        return AttackResult(adversarials, distances, success, batch.queries, candidates, nonfinite | batch.nonfinite)

    @torch.inference_mode(False)
    @torch.no_grad()
    def search(
        self, model: Any, images: Any, labels: Any, eps: Any = None, seed: int = 0, image_ids: Any = None,
        starts: Tensor | None = None, progress: Report | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Candidates (N, 1, C, H, W) and nonfinite flags (N,), for a caller with a verdict of its own."""
        return self._perturb(Batch.of(model, images, labels, seed, image_ids, progress), eps)

    def _run(self, job: Job) -> Any:
        attack = self._attack()
        try:
            with isolated(job.seed), torch.enable_grad():
                return TOOLKITS[self.toolkit].run(attack, job)
        except RefusedError:
            raise
        except ImportError as error:
            name = error.name or str(error)
            raise ImportError(f"{self.label} needs {name}, which cannot be imported: pip install {name}") from error
        except Exception as error:
            # Words are what neither we nor the constructors check: a wrong one only shows when it is looked up.
            words = any(isinstance(value, str) for value in self.arguments.values())
            raise (RefusedError if words else ToolkitError)(
                f"{self.label} failed within {self.toolkit} ({type(error).__name__}: {error}) with the arguments "
                f"{dict(self.arguments)}; it takes {defaults(attack)}: change them, or use another attack such as pgd"
            ) from error

    def _perturb(self, batch: Batch, eps: Any) -> tuple[Tensor, Tensor]:
        images, count = batch.images, len(batch.images)
        radius = None if eps is None else parse_epsilon(eps)
        if count == 0 or radius == 0:
            return images.unsqueeze(1).clone(), torch.zeros(count, dtype=torch.bool, device=images.device)
        low, high = batch.target.bounds
        # Toolkits work in [0, 1] (torchattacks clips to it) and float32; l0 counts pixels, which has no unit.
        unit = ((images - low) / (high - low)).float()
        scaled = None if radius is None else radius if self.norm == "l0" else radius / (high - low)
        seed, classes = _seed(batch), _classes(batch)
        draws = Draws(batch.target, count, images, seed, self.eot, batch.report)
        found = self._run(Job(draws, unit.clone(), batch.labels, scaled, self.norm, self.arguments, classes, seed))
        if not isinstance(found, Tensor) or found.shape != images.shape:
            raise ToolkitError(f"expected images from {self.label}, got something else: it is no attack on images")
        found = found.detach().to(unit)
        # What only went through a toolkit's units and back (0 to 255 in ART's PixelAttack) has not changed.
        found = torch.where((found - unit).abs() <= UNCHANGED, images, (low + (high - low) * found).to(images))
        # A toolkit does not say which images it asks about, so its draws are shared out evenly.
        batch.queries += -(-draws.rows // count)
        broken = ~torch.isfinite(found).flatten(1).all(1)
        found = torch.where(spread(broken, found), images, found)
        return _within(found, images, radius, self.norm, (low, high)).unsqueeze(1), draws.nonfinite | broken


def parse_attack(text: str, norm: Any = "linf", arguments: Mapping[str, Any] | None = None) -> ToolkitAttack:
    """The attack that "art:ProjectedGradientDescent" names. Arguments given as text ("20", "8/255") become numbers.

    The argument `eot` is ours: draws averaged for a gradient. Raises ValueError for text of another form and unknown
    names, ImportError for a toolkit that is not installed.
    """
    toolkit, colon, name = text.strip().partition(":")
    if not colon or not name:
        raise ValueError(f"expected toolkit:Attack, e.g. art:ProjectedGradientDescent, got {text!r}")
    given = {key: _value(value) for key, value in (arguments or {}).items()}
    eot = given.pop("eot", 1)
    return ToolkitAttack(toolkit.strip().lower(), name.strip(), norm, given, eot)


def is_toolkit_attack(text: str) -> bool:
    """Whether a name such as "foolbox:L2DeepFoolAttack" is meant for parse_attack."""
    return ":" in text


def _value(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return parse_epsilon(text) if "/" in text else literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _near(name: str, names: Any) -> str:
    lowered = {n.lower(): n for n in sorted(names)}
    close = get_close_matches(name.lower(), lowered, 5, 0.5) or [n for n in lowered if name.lower() in n][:5]
    found = [lowered[n] for n in close]
    return f"did you mean {', '.join(found)}?" if found else f"it has {', '.join(sorted(names))}"


def _seed(batch: Batch) -> int:
    ids = [int(i) % 2**64 for i in batch.ids]
    state = np.random.SeedSequence([SEED_WORD, batch.seed % 2**64, *ids]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def _classes(batch: Batch) -> int:
    with torch.no_grad():
        zero = torch.zeros(1, dtype=torch.int64, device=batch.images.device)
        return int(batch.target.draw(batch.images[:1], zero, zero, "attack", batch.seed).shape[1])


def _within(x: Tensor, images: Tensor, eps: float | None, norm: str, bounds: tuple[float, float]) -> Tensor:
    """x in the ball around the images and in the box; for l0 the pixels that changed least go back."""
    if eps is None:
        return x.clamp(*bounds)
    if norm != "l0":
        return project(x, images, eps, norm, bounds)
    change = (x - images).abs().amax(1).flatten(1)
    kept = min(int(eps), change.shape[1])
    least = change.argsort(dim=1, descending=True, stable=True)[:, kept:]
    mask = torch.ones_like(change, dtype=torch.bool).scatter(1, least, False).view(len(x), 1, *x.shape[2:])
    return torch.where(mask, x, images).clamp(*bounds)
