"""Our black-box attacks beside Foolbox's and ART's, on the embedded model: one table from one run.

    python benchmarks/black_box.py                       # everything; an hour on two cores
    python benchmarks/black_box.py --parts rays --limit 10

Needs foolbox 3.3.4 and adversarial-robustness-toolbox 1.20.1. The toolkits' attacks have no query budget: the model
counts what each image costs, remembers the closest image it misclassified so far, and stops the attack at the budget.
So at every budget they are credited with the best image they had seen, not only with what they would return. Only
images that JEM-0 classifies correctly are attacked.
"""

import os
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from measure import parts_and_limit
from torch import Tensor, nn

import jem_robust as jr
from jem_robust_attacks import BoundaryAttack, PointwiseAttack, RayS
from jem_robust_attacks.norms import distance

BUDGETS = (2000, 5000)
POINTWISE = (250, 2000)
RANDOM_QUERIES = 1000
FRESH = 50
PARTS = ("boundary", "pointwise", "rays", "random")


class SpentError(RuntimeError):
    """The budget is used up."""


class Counted(nn.Module):
    """The model as toolkits get it: float32 in, one plain draw a call, queries counted an image.

    originals (N, C, H, W): rows belong to them in turn. best: distance of the closest misclassified row at each budget.
    """

    def __init__(self, model: Any, originals: Tensor, labels: Tensor, norm: str, budgets: tuple[int, ...]) -> None:
        super().__init__()
        self.model, self.originals, self.labels, self.norm, self.budgets = model, originals, labels, norm, budgets
        self.best = torch.full((len(budgets), len(originals)), torch.inf, dtype=torch.float64)
        self.calls = self.queries = 0

    def forward(self, x: Tensor) -> Tensor:
        """Logits; SpentError once the budget is used up."""
        count, each = len(self.originals), len(x) // len(self.originals)
        if self.queries >= self.budgets[-1]:
            raise SpentError
        self.calls += 1
        self.queries += each
        with torch.no_grad():
            logits: Tensor = self.model(x.float().clamp(0, 1))
        owner = torch.arange(len(x)) // each if count == 1 else torch.arange(len(x)) % count
        far = distance(x.float(), self.originals[owner], self.norm)
        far[logits.argmax(1) == self.labels[owner]] = torch.inf
        for b, budget in enumerate(self.budgets):
            if self.queries <= budget:
                self.best[b].scatter_reduce_(0, owner, far, "amin")
        return logits


def foolbox(counted: Counted, attack: Any) -> Tensor | None:
    """Adversarials of a Foolbox attack, None where it was stopped or raised."""
    import foolbox as fb

    fmodel = fb.PyTorchModel(counted.eval(), bounds=(0, 1), device="cpu")
    try:
        return attack.run(fmodel, counted.originals, fb.criteria.Misclassification(counted.labels))  # type: ignore[no-any-return]
    except (SpentError, ValueError) as error:
        print(f"  Foolbox: {type(error).__name__} {error}" if str(error) else "", end="\n" if str(error) else "")
        return None


def art(counted: Counted, make: Callable[[Any], Any]) -> Tensor | None:
    """The same for an ART attack on one image that the model classifies correctly."""
    from art.estimators.classification import PyTorchClassifier

    shape = tuple(counted.originals.shape[1:])
    classifier = PyTorchClassifier(counted, nn.CrossEntropyLoss(), shape, 10, clip_values=(0, 1), device_type="cpu")
    try:
        found = torch.from_numpy(make(classifier).generate(counted.originals.numpy(), counted.labels.numpy())).float()
    except SpentError:
        return None
    return None if torch.equal(found, counted.originals) else found  # a failed attack returns what it was given


def seeded() -> None:
    np.random.seed(0)
    torch.manual_seed(0)


def row(*cells: object) -> None:
    widths = (34, 8, 7, 9, 22, 12, 10, 9)
    print("".join(f"{c!s:<{w}}" for c, w in zip(cells, widths, strict=True)), flush=True)


def ours(attack: Any, model: Any, x: Tensor, y: Tensor, name: str) -> Tensor:
    """Run one of our attacks and print its row."""
    counted = Calls(model)
    begin = time.perf_counter()
    result = attack(counted, x, y)
    seconds = time.perf_counter() - begin
    row(
        name, "JEM-0", len(x), int(result.queries.max()), f"{attack.norm} {result.distances.median():.4f}",
        f"{int((~result.success).sum())} failed", counted.calls, f"{seconds:.0f} s",
    )  # fmt: skip
    return result.distances


class Calls:
    """A model of the attack protocol whose calls are counted."""

    def __init__(self, model: Any) -> None:
        self.model, self.calls = model, 0
        self.bounds, self.deterministic = model.bounds, model.deterministic

    def draw(self, *arguments: Any) -> Tensor:
        """Passed on."""
        self.calls += 1
        return self.model.draw(*arguments)  # type: ignore[no-any-return]


def theirs(
    name: str, model: Any, x: Tensor, y: Tensor, norm: str, budgets: tuple[int, ...], run: Any, each: bool
) -> None:
    """Run a toolkit's attack, image by image or all at once, and print a row a budget."""
    seeded()
    begin, best, calls = time.perf_counter(), [], 0
    for i in range(0, len(x), 1 if each else len(x)):
        part = slice(i, i + 1) if each else slice(None)
        counted = Counted(model, x[part], y[part], norm, budgets)
        run(counted)
        best.append(counted.best)
        calls = max(calls, counted.calls)
    seconds = time.perf_counter() - begin
    for budget, far in zip(budgets, torch.cat(best, 1), strict=True):
        queries = counted.queries if budget > 10**6 else budget
        row(
            name, "JEM-0", len(x), queries, f"{norm} {far.median():.4f}", f"{int(far.isinf().sum())} failed", calls,
            f"{seconds:.0f} s",
        )  # fmt: skip


def boundary(model: Any, x: Tensor, y: Tensor) -> None:
    import foolbox as fb
    from art.attacks.evasion import BoundaryAttack as ARTBoundary

    for queries in BUDGETS:
        ours(BoundaryAttack(max_queries=queries), model, x, y, "BoundaryAttack")
    theirs(
        "Foolbox BoundaryAttack", model, x, y, "l2", BUDGETS, lambda c: foolbox(c, fb.attacks.BoundaryAttack()), False
    )
    make = lambda classifier: ARTBoundary(classifier, targeted=False, max_iter=10**6, verbose=False)  # noqa: E731
    theirs("ART BoundaryAttack", model, x, y, "l2", BUDGETS, lambda c: art(c, make), True)


def pointwise(model: Any, x: Tensor, y: Tensor) -> None:
    import foolbox as fb

    for queries in POINTWISE:
        ours(PointwiseAttack(max_queries=queries), model, x, y, "PointwiseAttack")
    attack = fb.attacks.PointwiseAttack(l2_binary_search=False)
    theirs("Foolbox PointwiseAttack", model, x, y, "l0", (10**7,), lambda c: foolbox(c, attack), False)


def rays(model: Any, x: Tensor, y: Tensor) -> None:
    from art.attacks.evasion import HopSkipJump

    ours(RayS(max_queries=BUDGETS[0]), model, x, y, "RayS")
    make = lambda c: HopSkipJump(c, norm=np.inf, max_iter=10**4, max_eval=10**4, verbose=False)  # noqa: E731
    theirs("ART HopSkipJump", model, x, y, "linf", BUDGETS[:1], lambda c: art(c, make), True)


def random(model: Any, x: Tensor, y: Tensor) -> None:
    """JEM-10: do what attacks report as successes fool fresh draws?"""
    import foolbox as fb
    from art.attacks.evasion import BoundaryAttack as ARTBoundary

    for attack in (BoundaryAttack(), BoundaryAttack("linf"), PointwiseAttack(), RayS()):
        begin = time.perf_counter()
        result = replace(attack, max_queries=RANDOM_QUERIES)(model, x, y)
        name = f"{type(attack).__name__}, {attack.norm} {result.distances[result.success].median():.3f}"
        spent = int(result.queries.max())
        _fooling(name, model, result.adversarials, result.success, y, spent, time.perf_counter() - begin)
    steps = RANDOM_QUERIES * 10 // 11
    runs = {
        "Foolbox BoundaryAttack": lambda c: foolbox(c, fb.attacks.BoundaryAttack(steps=steps)),
        "ART BoundaryAttack": lambda c: art(c, lambda k: ARTBoundary(k, targeted=False, max_iter=30, verbose=False)),
    }
    for name, run in runs.items():
        seeded()
        begin = time.perf_counter()
        counted = [Counted(model, x[i : i + 1], y[i : i + 1], "l2", (10 * RANDOM_QUERIES,)) for i in range(len(x))]
        found = [run(c) for c in counted]
        success = torch.tensor([f is not None for f in found])
        adversarials = torch.cat([x[i : i + 1] if f is None else f for i, f in enumerate(found)])
        spent = max(c.queries for c in counted)
        _fooling(name, model, adversarials, success, y, spent, time.perf_counter() - begin)


def _fooling(
    name: str, model: Any, adversarials: Tensor, success: Tensor, y: Tensor, queries: int, seconds: float
) -> None:
    """A row on how many of the fresh draws are fooled by what an attack reports as success."""
    won = success.nonzero().squeeze(1).repeat_interleave(FRESH)
    draws = torch.arange(FRESH).repeat(int(success.sum()))
    fooled = model.draw(adversarials[won], won, draws, "judge", 1).argmax(1) != y[won]
    mean = float(fooled.double().mean()) * FRESH
    cell = f"{mean:.1f} of {FRESH} fooled"
    row(name, "JEM-10", len(y), queries, cell, f"{int((~success).sum())} failed", "", f"{seconds:.0f} s")


def main() -> None:
    parts, limit = parts_and_limit(__doc__, PARTS, "100, 50, 100 and 10")
    warnings.simplefilter("ignore")
    model = jr.load_model("jem-fashion-mnist", steps=0)
    jem10 = jr.load_model("jem-fashion-mnist", steps=10, chains=1)
    packages = ("torch", "numpy", "foolbox", "adversarial-robustness-toolbox")
    print(*(f"{name} {version(name)}," for name in packages), f"{os.cpu_count()} cores, {torch.get_num_threads()} used")
    row("attack", "model", "images", "queries", "median distance", "failed", "calls", "time")
    for part, count in zip(PARTS, (100, 50, 100, 10), strict=True):
        if part in parts:
            x, y = right(model, limit or count)
            globals()[part](jem10 if part == "random" else model, x, y)


def right(model: Any, count: int) -> tuple[Tensor, Tensor]:
    """The first images that JEM-0 classifies correctly: on others Foolbox's boundary attack divides by zero."""
    x, y = jr.load_images("fashion-mnist", limit=2 * count)
    correct = model(x).argmax(1) == y
    return x[correct][:count], y[correct][:count]


if __name__ == "__main__":
    main()
