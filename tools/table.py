"""Measure the embedded models as the README shows them: python tools/table.py [OUT]

Runs `jem-robust attack` for JEM-0, JEM-1, JEM-10 and the baseline, linf and l2, on 100 images (the rest as the quick
preset), writes docs/curve.png and prints the README's table. Finished runs in OUT are taken as they are.
"""

import sys
from pathlib import Path

from jem_robust.cli import run
from jem_robust.commands.report import eps_text
from jem_robust.evaluation.curve import RobustnessCurve

RUNS = [("jem-fashion-mnist", k) for k in (0, 1, 10)] + [("baseline-fashion-mnist", 0)]
NORMS = ("linf", "l2")
IMAGES = 100


def measured(model: str, k: int, norm: str, out: Path) -> RobustnessCurve:
    """The curve of one run, from its folder if that is there."""
    folder = out / f"{model}-k{k}-{norm}"
    if not (folder / "result.json").exists():
        options = ["--model", model, "--steps", str(k), "--norm", norm, "--limit", str(IMAGES), "--out", str(folder)]
        if run(["attack", *options]):
            sys.exit(f"measuring {folder} failed")
    return RobustnessCurve.load(folder)


def main(out: str = "results") -> None:
    """Measure, plot and print."""
    curves = {(m, k, n): measured(m, k, n, Path(out)) for n in NORMS for m, k in RUNS}
    run(["plot", *[str(Path(out) / f"{m}-k{k}-{n}") for m, k, n in curves], "-o", "docs/curve.png"])
    for norm in NORMS:
        epsilons = [eps_text(e, norm) for e in curves[RUNS[0][0], RUNS[0][1], norm].epsilons]
        print(f"\n| {norm} | clean | " + " | ".join(f"eps {e}" for e in epsilons[1:]) + " |")
        print("| --- " * (len(epsilons) + 1) + "|")
        for model, k in RUNS:
            curve = curves[model, k, norm]
            cells = [
                f"{a:.1%} ({100 * low:.0f}-{high:.0%})"
                for a, low, high in zip(curve.accuracy, curve.low, curve.high, strict=True)
            ]
            print(f"| {model}, k = {k} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main(*sys.argv[1:])
