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
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from cost_law import SIDE, Point, Row, judged, recomputes
from laws_figure import draw
from measure import RESULTS, forward, interleaved, peak_bytes, print_growth, record, table
from torch import Tensor

import jem_robust as jr
from jem_robust_attacks.batch import Batch
from jem_robust_attacks.losses import margin

PARTS: dict[str, tuple[int, ...]] = {
    "k": (0, 1, 2, 5, 10, 20, 40), "chains": (1, 2, 5, 10), "draws": (1, 2, 4, 8),
    "batch": (1, 2, 4, 8, 16, 32, 64, 128, 256), "side": (8, 16, 28, 48, 64),
}  # fmt: skip
UNIT_CALLS = 8  # forwards timed at once: one alone is too short
MMAP_THRESHOLD, LARGE = -3, 2**16  # mallopt's name for it; below glibc's own the heap's holes do not hide what is used
MB = 2**20
HIDDEN = ("F expected", "F straight", "MB expected", "MB straight", "F seconds")  # from the table, for its width


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


def one(point: Point) -> None:
    """Print the bytes by which a gradient makes this process grow, beside the code that the first one loads."""
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, LARGE)
    Case.of(replace(point, k=min(point.k, 1), chains=1, draws=1, batch=2, budget="usual")).run()
    print_growth(Case.of(point).run)


def newest(path: Path) -> dict[str, list[Row]]:
    """Rows of the newest record of each part."""
    found: dict[str, list[Row]] = {}
    for text in path.read_text().splitlines():
        rows = json.loads(text)["rows"]
        found.update({part: [r for r in rows if r["part"] == part] for part in {r["part"] for r in rows}})
    return {part: found[part] for part in PARTS if part in found}


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
