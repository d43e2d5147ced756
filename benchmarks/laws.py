"""Cost laws of one attack gradient of a JEM-k classifier: time and memory over k, chains, EOT draws, batch and side.

    python benchmarks/laws.py                         # measures, records, draws docs/laws.png; eight minutes, two cores
    python benchmarks/laws.py --parts k,batch --repeats 5
    python benchmarks/laws.py --from-record           # draws again, from the newest record of each part

One gradient: logits by the attacks' own `Batch`, exact gradient of their margin in the images. The embedded network,
which takes any side, at k = 10, one chain, one draw, 32 images of 28x28 where nothing else is said. F: one forward of
one such image without gradients, in that batch and in the same run. Peak memory is that of a fresh process each.

Laws: 4k + 2 F an image, chain and draw (a step's gradient 2 F, its Hessian product 2 F), 2 F more a recomputed step,
scaled to the time of the base point; a step's graph in bytes, times rows and k + 1, since one is always in use. `work`
is what the model counted itself. What is off a law by more than a tenth is explained by that count, or by the fixed
cost of a call (then a straight line through the points without recomputation fits), or not at all.
"""

import argparse
import ctypes
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from measure import RESULTS, forward, interleaved, peak_bytes, print_growth, record, table
from PIL import Image
from torch import Tensor

import jem_robust as jr
from jem_robust.files import replacing
from jem_robust.reporting.plots import COLOURS
from jem_robust_attacks.batch import Batch
from jem_robust_attacks.losses import margin

PARTS: dict[str, tuple[int, ...]] = {
    "k": (0, 1, 2, 5, 10, 20, 40), "chains": (1, 2, 5, 10), "draws": (1, 2, 4, 8),
    "batch": (1, 2, 4, 8, 16, 32, 64, 128, 256), "side": (8, 16, 28, 48, 64),
}  # fmt: skip
SIDE = 28
TOLERANCE = 0.1
UNIT_CALLS = 8  # forwards timed at once: one alone is too short
MMAP_THRESHOLD, LARGE = -3, 2**16  # mallopt's name for it; below glibc's own the heap's holes do not hide what is used
MB = 2**20
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
HIDDEN = ("F expected", "F straight", "MB expected", "MB straight", "F seconds")  # from the table, for its width
Row = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """What a gradient is taken of. budget: "usual", "least" (one step's graph) or "unlimited"."""

    k: int = 10
    chains: int = 1
    draws: int = 1
    batch: int = 32
    side: int = SIDE
    budget: str = "usual"

    @property
    def law(self) -> float:
        """F an image: while all graphs are kept, or with those of one step only."""
        steps = 4 * self.k + 2 + 2 * (self.k - self.kept)
        return steps * (self.chains if self.k else 1) * self.draws * (self.side / SIDE) ** 2

    @property
    def kept(self) -> int:
        """Steps whose graphs the law assumes to stay."""
        return min(self.k, 1) if self.budget == "least" else self.k


@dataclass(frozen=True)
class Case:
    """A point made ready: `run` takes one gradient as PGD does. graph: bytes of one step's graph of all rows."""

    point: Point
    model: jr.JEMClassifier
    images: Tensor
    graph: float
    run: Callable[[], object]

    @classmethod
    def of(cls, point: Point) -> "Case":
        """Without the card's input_shape, so that the same network takes all sides."""
        loaded = jr.load_model("jem-fashion-mnist", steps=point.k, chains=point.chains)
        model = jr.JEMClassifier(loaded.network, loaded.refinement, loaded.input_range)
        images = torch.rand(point.batch, 1, point.side, point.side, generator=torch.Generator().manual_seed(0))
        row = model.memory / model.affordable_rows(images)
        graph = row * point.batch * point.draws * model.refinement.independent_chains
        budgets = {"usual": model.memory, "least": int(2 * graph) + 1, "unlimited": 2**40}
        model.memory = budgets[point.budget]
        batch, places = Batch.of(model, images, torch.arange(point.batch) % 10, 0), torch.arange(point.batch)
        labels = batch.labels.repeat(point.draws)

        def run() -> object:
            leaf = images.clone().requires_grad_()
            logits = batch.logits(leaf, places, batch.fresh(point.draws))
            return torch.autograd.grad(margin(logits, labels).sum(), leaf)[0]

        return cls(point, model, images, graph, run)

    def work(self) -> float:
        """F an image by the model's own count, larger images counting more."""
        before = replace(self.model.spent)
        self.run()
        spent = self.model.spent.since(before)
        return float((spent.forwards + spent.backwards) / self.point.batch * (self.point.side / SIDE) ** 2)


def measure(part: str, repeats: int) -> list[Row]:
    """Rows of a part; what recomputes is measured without a budget, too, and k with the least one."""
    points = [replace(Point(), **{part: value}) for value in PARTS[part]]  # type: ignore[arg-type]
    points += [replace(p, budget="least") for p in points if part == "k" and p.k > 1]
    cases = [Case.of(point) for point in points]
    work = [case.work() for case in cases]
    for case, count in zip(list(cases), list(work), strict=True):
        if case.point.budget == "usual" and recomputes(count, case.point.law):
            cases.append(Case.of(replace(case.point, budget="unlimited")))
            work.append(cases[-1].work())
    base = Case.of(Point())
    once = forward(base.model.network, 2 * base.images - 1)
    runs = {"F": lambda: [once() for _ in range(UNIT_CALLS)], **{str(case.point): case.run for case in cases}}
    seconds = interleaved(runs, repeats)
    unit = seconds["F"] / UNIT_CALLS / len(base.images)
    rows: list[Row] = []
    for case, count in zip(cases, work, strict=True):
        point, time = case.point, seconds[str(case.point)]
        peak = peak_bytes(["--one", json.dumps(asdict(point))]) or 0
        rows.append({
            "part": part, "value": getattr(point, part), "budget": point.budget, "seconds": time, "F seconds": unit,
            "law F": round(point.law, 2), "work F": round(count, 2), "F": round(time / unit / point.batch, 2),
            "law MB": round(case.graph * (point.kept + 1) / MB, 2), "MB": round(peak / MB, 2),
        })  # fmt: skip
    return rows


def recomputes(work: float, law: float) -> bool:
    return work > 1.01 * law


def one(point: Point) -> None:
    """Print the bytes by which a gradient makes this process grow, beside the code that the first one loads."""
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, LARGE)
    Case.of(replace(point, k=min(point.k, 1), chains=1, draws=1, batch=2, budget="usual")).run()
    print_growth(Case.of(point).run)


def straight_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope of the line of least relative squares through points with y > 0."""
    slope, intercept = np.polyfit(x, y, 1, w=1 / np.asarray(y))
    return float(intercept), float(slope)


def extent(part: str, value: float) -> float:
    """What cost is a straight line in."""
    return value**2 if part == "side" else value


def share(part: str, value: float) -> float:
    """Images in a call."""
    return value if part == "batch" else Point.batch


def per_call(part: str, row: Row, of: str) -> float:
    """How many of a row's figures make up a call: F are an image's, MB a call's."""
    return share(part, row["value"]) if of == "F" else 1


def line(part: str, rows: Sequence[Row], of: str) -> tuple[float, float]:
    """The line of a call's cost (F or MB) over extent, through what recomputes nothing."""
    kept = [r for r in rows if r["budget"] == "usual" and not recomputes(r["work F"], r["law F"])]
    return straight_line([extent(part, r["value"]) for r in kept], [r[of] * per_call(part, r, of) for r in kept])


def judged(part: str, rows: Sequence[Row]) -> list[Row]:
    """The rows with what law (time's goes through the base point) and line say, how far they are off, and why."""
    base = next(r for r in rows if r["value"] == getattr(Point, part) and r["budget"] == "usual")
    found = [dict(r) for r in rows]
    for of, scale in (("F", base["F"] / base["law F"]), ("MB", 1.0)):
        intercept, slope = line(part, rows, of)
        for r in found:
            r[f"{of} expected"] = law = scale * r[f"law {of}"]
            straight = (intercept + slope * extent(part, r["value"])) / per_call(part, r, of)
            r[f"{of} straight"] = straight = law if r["budget"] == "least" else straight
            recomputed = recomputes(r["work F"], r["law F"])
            r[f"{of} off"], r[f"{of} why"] = departure(r[of], law, straight, recomputed)
    return found


def departure(cost: float, law: float, straight: float, recomputed: bool) -> tuple[float, str | None]:
    """By what share cost is off, and the cause where that is more than the tolerance.

    What recomputes is held against the straight line of what does not, everything else against the law.
    """
    off_law, off_line = cost / law - 1, cost / straight - 1
    off = off_line if recomputed else off_law
    if abs(off) <= TOLERANCE:
        return off, None
    return off, "budget" if recomputed else "fixed" if abs(off_line) <= TOLERANCE else "other"


def newest(path: Path) -> dict[str, list[Row]]:
    """Rows of the newest record of each part."""
    found: dict[str, list[Row]] = {}
    for text in path.read_text().splitlines():
        rows = json.loads(text)["rows"]
        found.update({part: [r for r in rows if r["part"] == part] for part in {r["part"] for r in rows}})
    return {part: found[part] for part in PARTS if part in found}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated, of %(default)s")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("docs/laws.png"))
    parser.add_argument("--from-record", action="store_true", help="measure nothing")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        one(Point(**json.loads(given.one)))
        return
    for part in [] if given.from_record else given.parts.split(","):
        rows = measure(part, given.repeats)
        record("laws", rows)
        table([{name: value for name, value in r.items() if name not in HIDDEN} for r in judged(part, rows)])
    draw(newest(RESULTS / "laws.jsonl"), given.out)


if __name__ == "__main__":
    main()
