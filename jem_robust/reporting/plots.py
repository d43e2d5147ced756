"""Figures of robustness curves; drawn without a display."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jem_robust.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from jem_robust.evaluation.curve import RobustnessCurve

NORM_NAMES = {"linf": r"$L_\infty$", "l2": r"$L_2$", "l0": r"$L_0$"}
# Okabe & Ito's colours, told apart by colour-blind readers and in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vP*"


def plot_curves(curves: Iterable["RobustnessCurve"], path: str | Path, title: str | None = None) -> Path:
    """Draw accuracy over eps with 95 % intervals, one panel a norm, and write it to path (.png, .pdf or .svg).

    Raises ValueError without curves or for a file type that cannot be drawn.
    """
    from matplotlib.figure import Figure

    curves, path = list(curves), Path(path)
    if not curves:
        raise ValueError("expected at least one curve to plot, got none")
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"expected a figure file ending in .png, .pdf or .svg, got {path.name!r}")
    norms = sorted({curve.norm for curve in curves}, key=list(NORM_NAMES).index)
    figure = Figure(figsize=(6.4 * len(norms), 4.4), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(norms), squeeze=False)[0]
    for norm, axes in zip(norms, panels, strict=True):
        _panel(axes, norm, [curve for curve in curves if curve.norm == norm])
    figure.suptitle(title or "Robust accuracy, white box, judged on fresh noise", fontsize=11)
    with replacing(path) as temporary:
        figure.savefig(temporary)
    return path


def _panel(axes: "Axes", norm: str, curves: Sequence["RobustnessCurve"]) -> None:
    for i, curve in enumerate(curves):
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        axes.plot(
            curve.epsilons, 100 * curve.accuracy, color=colour, marker=marker, ms=5, lw=1.8, label=curve_label(curve)
        )
        axes.fill_between(curve.epsilons, 100 * curve.low, 100 * curve.high, color=colour, alpha=0.15, lw=0)
    axes.set(ylim=(-2, 102), xlim=(0, None), ylabel="accuracy (%)")
    axes.set_xlabel(f"{NORM_NAMES[norm]} perturbation size" + (" (x/255)" if norm == "linf" else ", pixels in [0, 1]"))
    if norm == "linf":
        ticks = np.unique(np.concatenate([curve.epsilons for curve in curves]))
        if len(ticks) <= 8:
            axes.set_xticks(ticks)
        axes.xaxis.set_major_formatter(lambda value, _: f"{255 * value:.3g}")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, title=f"95 % intervals, n = {_counts(curves)}", title_fontsize=8)


def curve_label(curve: "RobustnessCurve") -> str:
    """Model, k and norm, as legends name a curve."""
    model = curve.about.get("model", {})
    name = model.get("name", "model") if isinstance(model, dict) else str(model)
    refinement = curve.about.get("refinement") or {}
    k = f"k = {refinement['steps']}, " if "steps" in refinement else ""
    return f"{name}, {k}{NORM_NAMES[curve.norm]}"


def _counts(curves: Sequence["RobustnessCurve"]) -> str:
    return "/".join(dict.fromkeys(str(curve.n) for curve in curves))
