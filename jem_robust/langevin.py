"""SGLD refinement as pure functions of state, score and noise; all in the network's own units.

Source: Grathwohl et al. 2020 (JEM), section 3 and appendix H; Welling & Teh 2011 for SGLD. JEM takes a step size a and
a noise scale s that do not satisfy s^2 = 2a; they are kept as two settings.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isfinite
from numbers import Real
from typing import Any

import torch
from torch import Tensor

Score = Callable[[Tensor, int], Tensor]  # (state, step) -> grad log p
Noise = Callable[[int], Tensor]  # step -> standard normal noise; step 0 is the start


@dataclass(frozen=True)
class Refinement:
    """Settings of the SGLD chain that runs before classification.

    steps: number of SGLD steps k (0 = plain classifier). step_size: a in x + a * grad log p(x). noise: standard
    deviation s of the noise added per step. init_noise: standard deviation of the noise added to the start.
    chains: independent chains per image whose logits are averaged. clamp: clip x to the input range after each step.
    gradient_clamp: clip every component of grad log p to +-gradient_clamp, None for no clipping.
    All lengths are in the network's own input units. Raises ValueError or TypeError on impossible settings.
    """

    steps: int = 10
    step_size: float = 1.0
    noise: float = 0.01
    init_noise: float = 0.0
    chains: int = 5
    clamp: bool = False
    gradient_clamp: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("steps", 0), ("chains", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {value!r}: pass a whole number")
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}: pass {least} or more")
        for name in ("step_size", "noise", "init_noise"):
            value = getattr(self, name)
            if not _is_number(value) or value < 0:
                raise ValueError(f"{name} must be finite and not negative, got {value!r}: pass 0 or more")
        bound = self.gradient_clamp
        if bound is not None and not (_is_number(bound) and bound > 0):
            raise ValueError(f"gradient_clamp must be finite and positive, got {bound!r}: pass None for no clipping")

    @classmethod
    def paper(cls, norm: str, steps: int) -> "Refinement":
        """The 2019 evaluation commands: init_noise .03 for linf, 0 for l2; 5 chains, a = 1, s = .01, no clamp."""
        init_noise = {"linf": 0.03, "inf": 0.03, "l2": 0.0, "2": 0.0}.get(str(norm).lower())
        if init_noise is None:
            raise ValueError(f"expected the norm of a 2019 command, linf or l2, got {norm!r}: pass one of the two")
        return cls(steps=steps, init_noise=init_noise if steps else 0.0, chains=5 if steps else 1)

    def updated(self, **changes: Any) -> "Refinement":
        """Copy with some settings changed; steps=0 drops start noise and extra chains unless init_noise is given."""
        if changes.get("steps") == 0 and "init_noise" not in changes:
            changes = {**changes, "init_noise": 0.0, "chains": 1}
        return replace(self, **changes)

    @property
    def random(self) -> bool:
        """Whether two runs on the same image may differ."""
        return self.init_noise > 0 or (self.steps > 0 and self.noise > 0)

    @property
    def independent_chains(self) -> int:
        """Chains worth running: without randomness all of them are the same one."""
        return self.chains if self.random else 1


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and isfinite(value)


def score(log_density: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """grad log p(x): states (R, C, H, W) -> (R, C, H, W), detached. Works below no_grad and inference_mode.

    Raises ValueError where the log density does not depend on x.
    """
    return score_graph(log_density, x, create_graph=False)[1]


def score_graph(log_density: Callable[[Tensor], Tensor], x: Tensor, create_graph: bool = True) -> tuple[Tensor, Tensor]:
    """A leaf with the state and grad log p at it, with the graph between them unless told otherwise."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = (x.clone() if x.is_inference() else x.detach()).requires_grad_()
        value = log_density(leaf.clone()).sum()  # a clone, for networks that compute in place
        gradient = None
        if value.requires_grad:
            gradient = torch.autograd.grad(value, leaf, create_graph=create_graph, allow_unused=True)[0]
        if gradient is None:
            raise ValueError(
                "expected log p(x) to depend on x differentiably, got a constant: keep the network from detaching its "
                "input, or refine with steps=0"
            )
        return leaf, gradient


def clip_score(gradient: Tensor, refinement: Refinement) -> Tensor:
    """Clip grad log p to +-gradient_clamp where that is set."""
    bound = refinement.gradient_clamp
    return gradient if bound is None else gradient.clamp(-bound, bound)


def step(x: Tensor, gradient: Tensor, noise: Tensor | None, refinement: Refinement) -> Tensor:
    """One SGLD step before clipping to the input range: x + a * clip(gradient) + s * noise."""
    moved = x + refinement.step_size * clip_score(gradient, refinement)
    return moved if noise is None else moved + refinement.noise * noise


def start(x: Tensor, noise: Noise, refinement: Refinement) -> Tensor:
    """The chain's first state: x + init_noise * noise(0)."""
    return x + refinement.init_noise * noise(0) if refinement.init_noise > 0 else x


def step_noise(noise: Noise, t: int, refinement: Refinement) -> Tensor | None:
    """Noise of step t (counted from 1; 0 is the start), None where the refinement adds none."""
    return noise(t) if refinement.noise > 0 else None


def refine(x: Tensor, score_of: Score, noise: Noise, refinement: Refinement, bounds: tuple[float, float]) -> Tensor:
    """Run the whole chain on states (R, C, H, W) in network units, without gradient through it.

    noise(t) gives standard normal (R, C, H, W) noise: t = 0 for the start, 1 to steps for the steps.
    """
    x = start(x, noise, refinement)
    for t in range(1, refinement.steps + 1):
        x = step(x, score_of(x, t), step_noise(noise, t, refinement), refinement)
        x = x.clamp(*bounds) if refinement.clamp else x
    return x
