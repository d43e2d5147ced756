"""The picture of `laws.py`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cost_law import SIDE, Point, Row, judged, line, recomputes, straight_line
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from PIL import Image

from jem_robust.files import replacing
from jem_robust.reporting.plots import COLOURS

AXES = {
    "k": "SGLD steps k", "chains": "chains", "draws": "EOT draws", "batch": "batch (images)", "side": "side (pixels)"
}  # fmt: skip
LINES: dict[str, dict[str, Any]] = {
    "expected": {
        "ls": "--",
        "color": "0.35",
        "lw": 1.8,
        "label": "law: 4k + 2 forwards, k + 1 graphs",
    },
    "straight": {"color": COLOURS[5], "lw": 1.4, "label": "straight line + what every call costs"},
}
SERIES: dict[str, dict[str, Any]] = {
    "usual": {"marker": "o", "color": COLOURS[0], "label": "usual budget, 1 GB"},
    "unlimited": {"marker": "o", "color": COLOURS[0], "mfc": "white", "label": "no budget"},
    "least": {"marker": "^", "color": COLOURS[2], "label": "least budget: steps recomputed"},
}


def draw(parts: dict[str, list[Row]], out: Path) -> None:
    """Time above memory, a column a part; grey: the law, thin: the straight line, ringed: off the law."""
    figure = Figure(figsize=(3.5 * len(parts), 7.4), dpi=100, layout="constrained")
    panels = figure.subplots(2, len(parts), squeeze=False)
    for column, (part, rows) in enumerate(parts.items()):
        for row, of in enumerate(("F", "MB")):
            panel(panels[row][column], part, judged(part, rows), of)
        panels[1][column].set_xlabel(AXES[part], fontsize=13)
    panels[0][0].set_ylabel("time per image (F)", fontsize=13)
    panels[1][0].set_ylabel("peak memory (MB)", fontsize=13)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=12)
    figure.suptitle(
        f"What one attack gradient costs: k = {Point.k}, {Point.batch} images of {SIDE}\N{MULTIPLICATION SIGN}{SIDE}, "
        "one chain, one draw, one of them varied", fontsize=15,
    )  # fmt: skip
    with replacing(out) as temporary:
        figure.savefig(temporary)
        Image.open(temporary).convert("RGB").quantize(256).save(temporary, optimize=True)


def panel(axes: Axes, part: str, rows: Sequence[Row], of: str) -> None:
    usual = [r for r in rows if r["budget"] == "usual"]
    for key, style in LINES.items():
        axes.plot([r["value"] for r in usual], [r[f"{of} {key}"] for r in usual], **style)
    for budget, style in SERIES.items():
        some = [r for r in rows if r["budget"] == budget]
        if budget == "least":
            axes.plot([r["value"] for r in some], [r[f"{of} expected"] for r in some], "--", color=style["color"])
        axes.plot([r["value"] for r in some], [r[of] for r in some], ls="none", ms=7, **style)
    off = [r for r in usual if r[f"{of} why"]]
    axes.plot([r["value"] for r in off], [r[of] for r in off], "o", color=COLOURS[1], mfc="none", ms=14, mew=1.8,
              label="more than 10 % off")  # fmt: skip
    for r in off[:1] if part == "k" else off:
        axes.annotate(f"\N{MULTIPLICATION SIGN}{1 + r[f'{of} off']:.2g}", (r["value"], r[of]),
                      (9, -13), textcoords="offset points", fontsize=11, color=COLOURS[1])  # fmt: skip
    if part != "k":
        axes.set(xscale="log", yscale="log")
        axes.set_xticks([r["value"] for r in usual], [str(r["value"]) for r in usual])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    low, high = axes.get_ylim()
    axes.set_ylim(2 * low if part == "k" else low, high * (1.2 if part == "k" else 2.0))  # room for the notes
    where: Row = {"x": 0.98, "ha": "right"} if part == "batch" and of == "F" else {"x": 0.03, "ha": "left"}
    axes.text(y=0.98, s="\n".join(notes(part, rows, of)), transform=axes.transAxes, va="top", fontsize=11, **where)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def notes(part: str, rows: Sequence[Row], of: str) -> list[str]:
    """The causes in words."""
    intercept, slope = line(part, rows, of)
    if part == "k":
        least = [r for r in rows if r["budget"] == "least"]
        recomputed = straight_line([r["value"] for r in least], [r[of] for r in least])[1]
        kept = slope / Point.batch if of == "F" else slope
        return [f"a step, kept: {kept:.2g} {of}", f"recomputed: {recomputed:.2g} {of}"]
    usual = [r for r in rows if r["budget"] == "usual"]
    found = [f"every call: {intercept:.0f} {of} more"] if "fixed" in {r[f"{of} why"] for r in usual} else []
    full = [r for r in usual if recomputes(r["work F"], r["law F"])]
    work = f"{full[-1]['work F']:.0f} F of work, not {full[-1]['law F']:.0f}" if full else ""
    return found + [f"budget full: {work if of == 'F' else 'fewer graphs kept'}" for _ in full[:1]]
