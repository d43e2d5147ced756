"""What `jem-robust attack --estimate` expects, beside what then happens.

    python benchmarks/estimates.py                                   # ten minutes on two idle cores
    python benchmarks/estimates.py --parts k0,boundary --limit 20

Each run is estimated as the command line does, then made; once, for it takes minutes. Ratios are expected / happened.
A run against an attack of ART needs adversarial-robustness-toolbox.
"""

import time
from typing import Any

from measure import parts_and_limit, record, table

import jem_robust as jr
from jem_robust.evaluation.estimate import TRIAL_IMAGES, estimate
from jem_robust.evaluation.members import from_name

EPSILONS = {"linf": [0, 4 / 255, 8 / 255, 16 / 255], "l2": [0, 0.5, 1, 2]}
MANY = [2 * i / 255 for i in range(11)]
PGD = {"iterations": 10, "eot": 1}
JEM = "jem-fashion-mnist"
# Model, k, norm, attacks, their settings, images and what else is not as in the quick preset.
RUNS: dict[str, tuple[str, int, str, list[str], dict[str, Any], int, dict[str, Any]]] = {
    "k0": (JEM, 0, "linf", ["pgd"], PGD, 64, {}),
    "k0-ten-eps": (JEM, 0, "linf", ["pgd"], {"iterations": 40}, 200, {"epsilons": MANY}),
    "baseline-l2": ("baseline-fashion-mnist", 0, "l2", ["pgd"], {"iterations": 40, "restarts": 5}, 200, {}),
    "k1-l2": (JEM, 1, "l2", ["transfer", "pgd"], PGD, 64, {}),
    "k1-restarts": (JEM, 1, "linf", ["transfer", "pgd"], {**PGD, "restarts": 6}, 64, {}),
    "k1-eot": (JEM, 1, "linf", ["transfer", "pgd"], {"iterations": 10}, 40, {"attack_chains": 5}),
    "k10": (JEM, 10, "linf", ["transfer", "pgd"], PGD, 64, {}),
    "boundary": (JEM, 0, "l2", ["boundary"], {"max_queries": 500}, 40, {}),
    "art": (JEM, 1, "linf", ["art:ProjectedGradientDescent"], {}, 20, {}),
}  # fmt: skip


def row(name: str, limit: int | None) -> dict[str, Any]:
    """One run, expected and made."""
    model_name, steps, norm, names, settings, count, changes = RUNS[name]
    model = jr.load_model(model_name, steps=steps)
    images, labels = jr.load_images("fashion-mnist", limit=min(count, limit or count))
    arguments = {
        "norm": norm, "epsilons": EPSILONS[norm], "attacks": [from_name(n, norm, **settings) for n in names],
        "draws": 8, "select_draws": 4, "seed": 0, "batch_size": None, "attack_chains": 1, **changes,
    }  # fmt: skip
    begin = time.perf_counter()
    expected = estimate(model, images, labels, probe_images=TRIAL_IMAGES, **arguments)
    spent_on_it = time.perf_counter() - begin
    about = jr.evaluate(model, images, labels, **arguments).about
    rows = sum(about["spent"].values())
    return {
        "run": name, "images": len(images), "tried": expected.probed, "rows": rows, "rows ratio": expected.rows / rows,
        "seconds": about["seconds"], "seconds ratio": expected.seconds / about["seconds"], "estimate s": spent_on_it,
    }  # fmt: skip


def main() -> None:
    """Estimate, run, print, record."""
    names, limit = parts_and_limit(__doc__, RUNS, "20 to 200")
    rows = [row(name, limit) for name in names]
    record("estimates", rows)
    table(rows)


if __name__ == "__main__":
    main()
