"""A robustness curve: what an evaluation returns, saves and loads."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jem_robust.evaluation.verdict import Floats, bootstrap_interval, clopper_pearson, monotone
from jem_robust.reporting import records

THREAT_MODEL = "white box, fresh noise: the attacker knows everything but the noise of the judging draws"


@dataclass(frozen=True)
class RobustnessCurve:
    """Robustness of one model over E epsilons on N images.

    p_correct (E, N): share of judge draws in which the image's worst candidate is classified correctly.
    adversarials (E, N, C, H, W) float32, the judged candidates; distances (E, N) theirs from the images in `norm`.
    clean: mean share of correct draws of the unperturbed images. warnings: texts; checks: value, threshold, verdict.
    per_attack: for every eps and attack how many images it was tried on, broke, and the accuracy left after it; source:
    the attack each judged candidate comes from (-1: the clean image).
    about: model card, refinement, settings, versions, seconds, work spent.
    """

    norm: str
    epsilons: Floats
    p_correct: Floats
    clean: float
    draws: int
    select_draws: int
    seed: int
    labels: NDArray[np.int64]
    adversarials: NDArray[np.float32]
    distances: Floats
    warnings: list[str] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    per_attack: list[dict[str, Any]] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)
    complete: bool = True

    def __post_init__(self) -> None:
        low, high = bootstrap_interval(self.p_correct, self.seed) if len(self.epsilons) else (np.zeros(0), np.zeros(0))
        object.__setattr__(self, "low", low)
        object.__setattr__(self, "high", high)

    low: Floats = field(init=False)
    high: Floats = field(init=False)

    @property
    def n(self) -> int:
        """Images measured."""
        return int(self.p_correct.shape[1])

    @property
    def raw(self) -> Floats:
        """Mean p_correct over all images, before isotonic regression: (E,)."""
        return np.asarray(self.p_correct.mean(1))

    @property
    def accuracy(self) -> Floats:
        """The headline: isotonic (non-increasing) regression of `raw` over eps, (E,)."""
        return monotone(self.raw)

    @property
    def robust(self) -> NDArray[np.bool_]:
        """Majority verdict per image, (E, N): right in more than half the judge draws."""
        return self.p_correct > 0.5

    @property
    def majority(self) -> Floats:
        """Share of images the majority verdict calls robust, (E,)."""
        return np.asarray(self.robust.mean(1))

    def save(self, out: str | Path) -> list[Path]:
        """Write result.json, adversarials.npz and curve.png into `out`; returns their paths."""
        from jem_robust.reporting.plots import plot_curves

        out = Path(out)
        paths = [out / "result.json", out / "adversarials.npz", out / "curve.png"]
        arrays: dict[str, NDArray[Any]] = {
            "images": self.adversarials, "labels": self.labels, "epsilons": self.epsilons,
            "distances": self.distances, "p_correct": self.p_correct,
        }  # fmt: skip
        records.write_arrays(paths[1], arrays)
        plot_curves([self], path=paths[2])
        records.write_json(paths[0], self.record())
        return paths

    def record(self) -> dict[str, Any]:
        """What result.json holds."""
        intervals = [clopper_pearson(int(hits), self.n) for hits in self.robust.sum(1)]
        return {
            "schema_version": records.SCHEMA_VERSION,
            "complete": self.complete,
            "threat_model": THREAT_MODEL,
            "norm": self.norm,
            "epsilons": self.epsilons,
            "accuracy": self.accuracy,
            "low": self.low,
            "high": self.high,
            "raw": self.raw,
            "majority": self.majority,
            "majority_low": [low for low, _ in intervals],
            "majority_high": [high for _, high in intervals],
            "clean": self.clean,
            "n": self.n,
            "draws": self.draws,
            "select_draws": self.select_draws,
            "seed": self.seed,
            "per_attack": self.per_attack,
            "checks": self.checks,
            "warnings": self.warnings,
            **self.about,
        }

    @classmethod
    def load(cls, out: str | Path) -> "RobustnessCurve":
        """Read a curve saved in the folder `out`. Raises ValueError for files that are missing or not ours."""
        record, arrays = records.read_result(Path(out))
        known = {"norm", "clean", "draws", "select_draws", "seed", "warnings", "checks", "per_attack", "complete"}
        derived = {"schema_version", "threat_model", "epsilons", "accuracy", "low", "high", "raw", "n",
                   "majority", "majority_low", "majority_high"}  # fmt: skip
        return cls(
            epsilons=arrays["epsilons"],
            p_correct=arrays["p_correct"],
            labels=arrays["labels"],
            adversarials=arrays["images"],
            distances=arrays["distances"],
            about={k: v for k, v in record.items() if k not in known | derived},
            **{k: record[k] for k in known},
        )
