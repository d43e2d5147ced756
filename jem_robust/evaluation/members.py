"""The attacks of an evaluation: an attack object, the view of the model it runs on, and the name it is reported by."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import partial
from typing import Any
from warnings import warn

import torch
from torch import Tensor

import jem_robust_attacks
from jem_robust.precision import has_bf16
from jem_robust_attacks.norms import distance, project, spread
from jem_robust_attacks.target import Target, as_target

KINDS: dict[str, str] = {
    "pgd": "PGD", "boundary": "BoundaryAttack", "pointwise": "PointwiseAttack", "rays": "RayS", "square": "Square",
}  # fmt: skip
NAMES = ("transfer", *KINDS)
Settled = Callable[[Tensor, Tensor], Tensor]  # candidates (n, ...) of the images at (n,) -> (n,) bool, fooled for sure


@dataclass(frozen=True)
class Member:
    """One attack of an evaluation. target: what it attacks, not necessarily what is judged."""

    name: str
    attack: Any
    target: Target

    @property
    def minimizes(self) -> bool:
        """Whether the attack looks for the smallest distance once, rather than within a given eps."""
        return bool(getattr(self.attack, "minimizes", False))

    def candidates(
        self, images: Tensor, labels: Tensor, eps: float | None, seed: int, ids: Tensor, starts: Tensor,
        report: Callable[[int], None], settled: Settled | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Candidates (N, M, C, H, W) as float32 can hold them, and non-finite flags (N,).

        settled: asked, where the attack is a PGD on a random model, whether it may leave images.
        """
        run = getattr(self.attack, "search", None)
        if type(self.attack) is jem_robust_attacks.PGD and not self.target.deterministic:
            run = partial(self.attack.search, settled=settled)
        if run is not None:
            found, nonfinite = run(self.target, images, labels, eps, seed, ids, starts, report)
        else:
            result = self.attack(self.target, images, labels, eps, seed, ids, starts, report)
            found = result.candidates if result.candidates is not None else result.adversarials.unsqueeze(1)
            nonfinite = result.nonfinite
        if nonfinite is None:
            nonfinite = torch.zeros(len(images), dtype=torch.bool, device=images.device)
        broken = ~torch.isfinite(found).flatten(2).all(2) if len(images) else nonfinite.unsqueeze(1)
        found = torch.where(broken.view(*broken.shape, 1, 1, 1), images.unsqueeze(1), found)
        return found.float().to(images.dtype), nonfinite.to(images.device)


def within(candidate: Tensor, images: Tensor, eps: float, norm: str, bounds: tuple[float, float]) -> Tensor:
    """Candidates (N, ...) made to keep norm and box; where that is not possible (l0), the images themselves."""
    if norm == "l0":
        kept = distance(candidate, images, norm) <= eps
        return torch.where(spread(kept, images), candidate.clamp(*bounds), images)
    return project(candidate, images, eps, norm, bounds)


def resolve(attacks: Sequence[Any], model: Any, images: Tensor, norm: str, attack_chains: int | None) -> list[Member]:
    """Members from attack objects and names ("transfer", "pgd", ...).

    attack_chains: chains of the view that attacks differentiate, None for the model's own.
    Raises ValueError for unknown names, for another norm than `norm`, and for transfer without a refinement.
    """
    if isinstance(attacks, str) or not attacks:
        raise ValueError(f"expected a list of attacks such as ['pgd'], got {attacks!r}")
    members = [_member(attack, model, images, norm, attack_chains) for attack in attacks]
    names = [member.name for member in members]
    # Two of a kind are told apart by their place: pgd, pgd 2.
    return [
        replace(
            member,
            name=f"{member.name} {names[:i].count(member.name) + 1}" if member.name in names[:i] else member.name,
        )
        for i, member in enumerate(members)
    ]


def _member(attack: Any, model: Any, images: Tensor, norm: str, chains: int | None) -> Member:
    if isinstance(attack, str):
        attack = from_name(attack, norm)
    transfer = isinstance(attack, Transfer)
    name = "transfer" if transfer else report_name(attack)
    if isinstance(attack, Transfer):
        attack = attack.attack
        if isinstance(attack, jem_robust_attacks.PGD):  # what barely fools k = 0 seldom fools the refined model
            attack = replace(attack, early_stop=False)
    if isinstance(attack, type) or not (callable(attack) or hasattr(attack, "search")):
        raise TypeError(f"expected an attack's name or object such as PGD(), got {attack!r}: make an object of it")
    if getattr(attack, "norm", norm) != norm:
        raise ValueError(
            f"expected attacks of the evaluation's norm {norm}, got {attack.norm} of {attack}: pass one norm"
        )
    view = model
    if transfer:
        if not hasattr(model, "with_refinement"):
            raise ValueError(
                "expected a JEMClassifier for transfer from k = 0, got a model without refinement: use pgd"
            )
        view = model.with_refinement(steps=0, init_noise=0)
    elif chains is not None and hasattr(model, "with_refinement") and not model.deterministic:
        view = model.with_refinement(chains=chains)
    return Member(name, attack, as_target(view, images))


def narrowed(model: Any, precision: str) -> Any:
    """The view of a model whose attack gradients have this precision. ValueError where it has no such view."""
    if precision == "float32":
        return model
    if not hasattr(model, "with_precision"):
        raise ValueError(f"expected a JEMClassifier for precision {precision!r}, got another model: use float32")
    view = model.with_precision(precision)
    if not has_bf16(model.device):
        warn("this processor only imitates bfloat16, which takes several times longer: use float32", stacklevel=3)
    return view


def descending(members: list[Member], epsilons: Sequence[float]) -> list[Member]:
    """The members, with PGD on deterministic models run at many epsilons from the largest down."""
    several = sum(eps > 0 for eps in epsilons) > 1

    def lowered(attack: Any, target: Target) -> Any:
        suits = several and type(attack) is jem_robust_attacks.PGD and attack.early_stop and target.deterministic
        return jem_robust_attacks.Descent(attack, tuple(epsilons)) if suits else attack

    return [replace(member, attack=lowered(member.attack, member.target)) for member in members]


def lowerable(members: Sequence[Member], epsilons: Sequence[float]) -> bool:
    """Whether an evaluation of a random model may go from the largest eps down: all attacks are PGD, of several eps."""
    several = sum(eps > 0 for eps in epsilons) > 1
    return several and all(type(member.attack) is jem_robust_attacks.PGD for member in members)


def report_name(attack: Any) -> str:
    """The name an attack object goes by in tables: its own, or the command line's word for its kind."""
    kind = type(attack).__name__
    own = getattr(attack, "label", None) or getattr(attack, "name", None)
    return str(own or next((name for name, k in KINDS.items() if k == kind), kind))


@dataclass(frozen=True)
class Transfer:
    """An attack to be run on the same network without refinement (k = 0) and judged on the model itself."""

    attack: Any


def settings_taken(attack: Any) -> set[str]:
    """Which of the settings of from_name this attack of its making takes: none if it is a toolkit's."""
    own = attack.attack if isinstance(attack, Transfer) else attack
    names = set() if hasattr(own, "toolkit") else {field.name for field in fields(own)}
    return names | ({"iterations"} if "steps" in names else set())


def arguments_taken(attack: Any) -> list[str]:
    """Names of the attack's own arguments."""
    own = attack.attack if isinstance(attack, Transfer) else attack
    return [*own.takes, "eot"] if hasattr(own, "toolkit") else [f.name for f in fields(own) if f.name != "norm"]


def from_name(name: str, norm: str, arguments: Mapping[str, Any] | None = None, **settings: Any) -> Any:
    """An attack by its name: "transfer", "pgd", ..., or a toolkit's, e.g. "art:ProjectedGradientDescent".

    arguments: the attack's own, refused if it does not know them. settings: those of them that one of our attacks knows
    are taken, iterations standing for a gradient attack's steps; toolkits keep their own defaults.
    Raises ValueError for unknown names, arguments and norms, ImportError for a toolkit that is not installed.
    """
    if ":" in name:
        from jem_robust.adapters.toolkit_attacks import parse_attack

        return parse_attack(name, norm, arguments)
    if name == "transfer":
        return Transfer(from_name("pgd", norm, arguments, **settings))
    kind = getattr(jem_robust_attacks, KINDS.get(name, ""), None)
    if kind is None:
        near = get_close_matches(name, NAMES, 3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"expected an attack out of {', '.join(NAMES)}, got {name!r}{hint}")
    known = {field.name for field in fields(kind)}
    taken = {"norm": norm, **settings, **({"steps": settings["iterations"]} if "iterations" in settings else {})}
    own = dict(arguments or {})
    if unknown := sorted(set(own) - known):
        raise ValueError(f"expected arguments of {name} out of {', '.join(sorted(known))}, got {', '.join(unknown)}")
    if norm not in _norms(kind):
        fitting = [other for other, k in KINDS.items() if norm in _norms(getattr(jem_robust_attacks, k))]
        raise ValueError(
            f"expected a norm that {name} has, {' or '.join(_norms(kind))}, got {norm!r}: for {norm} there is "
            f"{' or '.join(fitting)}"
        )
    return kind(**{**{k: v for k, v in taken.items() if k in known and v is not None}, **own})


def _norms(kind: type) -> tuple[str, ...]:
    """Norms an attack of ours can be made for."""
    return getattr(kind, "norms", ("linf", "l2"))
