"""What decides a training run."""

from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

from jem_robust.langevin import Refinement
from jem_robust.training.objectives import OBJECTIVES

CHOICES = {
    "objective": tuple(OBJECTIVES),
    "starts": ("class-gaussian", "uniform"),
    "precision": ("auto", "bf16", "float32"),
}
WHOLE = {
    **dict.fromkeys(("iterations", "batch_size", "buffer_size", "validation_images", "validate_every"), 1),
    **dict.fromkeys(("warmup", "retries", "seed"), 0),
}
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("learning_rate", "data_noise", "gap_penalty", "gap_limit"), (0, inf)),
    **dict.fromkeys(("restart", "backoff", "averaging"), (0, 1)),
}
POSITIVE = ("learning_rate", "gap_limit", "backoff")


@dataclass(frozen=True)
class TrainingSettings:
    """All that decides a training run; goes into the checkpoint's card.

    objective: "jem" (log p(y|x) + log p(x)) or "ce". data_noise: standard deviation of the noise on training images,
    sampler: SGLD chain per iteration, both in network units. warmup: iterations of linear rise of the learning rate.
    drops: (share of iterations, factor on the learning rate) pairs. restart: share of chains begun afresh.
    averaging: decay of the running mean of the weights that is validated and saved; lower at first, 0 for no mean.
    precision: "bf16" or "float32" for sampling; "auto": bf16 where the network's device computes in it, which the card
    then says. gap_penalty: weight of the squared energy gap in the loss. gap_limit, retries, backoff: see
    DivergenceGuard; after a divergence the learning rate is multiplied by backoff, at most `retries` times. Raises
    ValueError on impossible settings.
    """

    objective: str = "jem"
    iterations: int = 4000
    batch_size: int = 64
    learning_rate: float = 5e-4
    warmup: int = 500
    drops: tuple[tuple[float, float], ...] = ((0.8, 0.5),)
    data_noise: float = 0.05
    starts: str = "class-gaussian"
    buffer_size: int = 10_000
    restart: float = 0.05
    sampler: Refinement = field(default_factory=lambda: Refinement(10, 1.0, 0.01, chains=1, clamp=True))
    input_range: tuple[float, float] = (-1.0, 1.0)
    precision: str = "auto"
    validation_images: int = 5000
    validate_every: int = 500
    gap_penalty: float = 10.0
    averaging: float = 0.998
    gap_limit: float = 3.0
    retries: int = 3
    backoff: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"expected {name} out of {allowed}, got {getattr(self, name)!r}: pass one of them")
        for name, least in WHOLE.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"expected {name} to be a whole number of at least {least}, got {value!r}")
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if not (_is_number(value) and low <= value <= (value if high is None else high)):
                raise ValueError(
                    f"expected {name} from {low} to {'any number' if high is None else high}, got {value!r}"
                )
            if value == 0 and name in POSITIVE:
                raise ValueError(f"expected {name} above 0, got 0: pass a positive number")
        limits = self.input_range
        if len(limits) != 2 or not all(map(_is_number, limits)) or not limits[0] < limits[1]:
            raise ValueError(f"expected an input range (low, high) with low < high, got {limits}")
        if not all(len(drop) == 2 and all(_is_number(v) and v >= 0 for v in drop) for drop in self.drops):
            raise ValueError(f"expected drops as (share of iterations, factor) pairs from 0 up, got {self.drops}")
        # Lists, as JSON and YAML give them, would make a resumed run look like another one.
        object.__setattr__(self, "input_range", tuple(limits))
        object.__setattr__(self, "drops", tuple(map(tuple, self.drops)))

    def rate(self, iteration: int) -> float:
        """Learning rate of an iteration, counted from 0."""
        factor = min(1.0, (iteration + 1) / self.warmup) if self.warmup else 1.0
        passed = [f for share, f in sorted(self.drops) if iteration >= share * self.iterations]
        return self.learning_rate * factor * (passed[-1] if passed else 1.0)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
