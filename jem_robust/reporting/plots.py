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
DODGE, MARGIN = 0.008, 0.04  # shares of the largest eps


def plot_curves(
    curves: "RobustnessCurve | Iterable[RobustnessCurve]", path: str | Path, title: str | None = None
) -> Path:
    """Draw accuracy over eps with 95 % intervals, one panel a norm, and write it to path (.png, .pdf or .svg).

    Raises ValueError without curves or for a file type that cannot be drawn.
    """
    from matplotlib.figure import Figure

    from jem_robust.evaluation.curve import RobustnessCurve

    curves, path = [curves] if isinstance(curves, RobustnessCurve) else list(curves), Path(path)
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
    widest = max(float(curve.epsilons.max()) for curve in curves) or 1.0
    labels = [curve_label(curve) for curve in curves]
    for i, curve in enumerate(curves):
        same = [j for j, label in enumerate(labels) if label == labels[i]]
        label = labels[i] + (f" ({same.index(i) + 1})" if len(same) > 1 else "")
        label += f", n = {curve.n}" if len({c.n for c in curves}) > 1 else ""
        # Curves beside each other rather than over each other, where they share points.
        shift = DODGE * widest * (i - (len(curves) - 1) / 2)
        spans = 100 * np.stack([curve.accuracy - curve.low, curve.high - curve.accuracy])
        axes.errorbar(
            curve.epsilons + shift, 100 * curve.accuracy, spans, color=COLOURS[i % len(COLOURS)],
            marker=MARKERS[i % len(MARKERS)], ms=5, lw=1.6, elinewidth=1, capsize=2.5, label=label, clip_on=False,
        )  # fmt: skip
    axes.set(ylim=(-2, 102), xlim=(-MARGIN * widest, (1 + MARGIN) * widest), ylabel="accuracy (%)")
    axes.set_xlabel(f"{NORM_NAMES[norm]} perturbation size" + (" (x/255)" if norm == "linf" else ", pixels in [0, 1]"))
    if norm == "linf":
        ticks = np.unique(np.concatenate([curve.epsilons for curve in curves]))
        if len(ticks) <= 8:
            axes.set_xticks(ticks)
        axes.xaxis.set_major_formatter(lambda value, _: f"{255 * value:.3g}")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, title=_basis(curves), title_fontsize=8)


def curve_label(curve: "RobustnessCurve") -> str:
    """Model, k and norm, as legends name a curve."""
    model = curve.about.get("model", {})
    name = model.get("name", "model") if isinstance(model, dict) else str(model)
    refinement = curve.about.get("refinement") or {}
    k = f"k = {refinement['steps']}, " if "steps" in refinement else ""
    return f"{name}, {k}{NORM_NAMES[curve.norm]}"


def _basis(curves: Sequence["RobustnessCurve"]) -> str:
    counts = {curve.n for curve in curves}
    return "95 % intervals" + (f", n = {counts.pop()}" if len(counts) == 1 else "")
