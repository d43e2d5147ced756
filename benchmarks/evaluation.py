"""Time to the same robustness curve: ours beside toolkits' PGD looped over epsilons, on the same wrapped model.

    python benchmarks/evaluation.py                   # JEM-0 and JEM-10; five minutes on two idle cores
    python benchmarks/evaluation.py --parts jem0 --limit 50

Needs foolbox, adversarial-robustness-toolbox and torchattacks. All run PGD of 40 iterations, steps of 2.5 * eps / 40.
The time to a curve has all that it takes: attacks, selection (ours) and judging on common draws; accuracies are
over all images, of the last iterates (theirs) and the selected candidates (ours). `attack s` are the toolkits' attacks
alone; `select`, `judge`: what part of the seconds went there. Nothing is run twice, for the attacks of one curve take
minutes; `load` in the record says what else the machine did.
"""

import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

import numpy as np
import torch
from measure import forward, interleaved, parts_and_limit, record, table
from torch import Tensor

import jem_robust as jr
from jem_robust.precision import has_bf16
from jem_robust_attacks import PGD

ITERATIONS = 40
BATCH = 64
PARTS = {
    "jem0": (0, 200, [2 * i / 255 for i in range(1, 11)]),
    "jem10": (10, 40, [4 / 255, 8 / 255, 12 / 255, 16 / 255]),
}


def foolbox(model: Any, x: Tensor, y: Tensor, epsilons: list[float]) -> list[Tensor]:
    from foolbox.attacks import LinfPGD

    from jem_robust.adapters.foolbox import to_foolbox

    attack = LinfPGD(rel_stepsize=2.5 / ITERATIONS, steps=ITERATIONS)
    parts = [attack(to_foolbox(model), a, b, epsilons=epsilons)[1] for a, b in _batches(x, y)]
    return [torch.cat(same) for same in zip(*parts, strict=True)]


def art(model: Any, x: Tensor, y: Tensor, epsilons: list[float]) -> list[Tensor]:
    from art.attacks.evasion import ProjectedGradientDescentPyTorch

    from jem_robust.adapters.art import JEMARTClassifier

    classifier = JEMARTClassifier(model)

    def attacked(eps: float) -> Tensor:
        attack = ProjectedGradientDescentPyTorch(
            classifier, eps=eps, eps_step=2.5 * eps / ITERATIONS, max_iter=ITERATIONS, batch_size=BATCH, verbose=False
        )
        return torch.from_numpy(attack.generate(x.numpy(), y.numpy()))

    return [attacked(eps) for eps in epsilons]


def torchattacks(model: Any, x: Tensor, y: Tensor, epsilons: list[float]) -> list[Tensor]:
    import torchattacks as toolkit

    from jem_robust.adapters.torchattacks import to_torchattacks

    net = to_torchattacks(model)
    attacks = [toolkit.PGD(net, eps, 2.5 * eps / ITERATIONS, ITERATIONS) for eps in epsilons]
    return [torch.cat([attack(a, b) for a, b in _batches(x, y)]) for attack in attacks]


def _batches(x: Tensor, y: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    return zip(x.split(BATCH), y.split(BATCH), strict=True)


def judged(model: Any, x: Tensor, y: Tensor, draws: int) -> float:
    """Mean share of correct judge draws."""
    ids = torch.arange(len(x)).repeat(draws)
    draw_ids = torch.arange(draws).repeat_interleave(len(x))
    with torch.no_grad():
        logits = model.draw(x.repeat(draws, 1, 1, 1), ids, draw_ids, "judge", 0)
    return float((logits.argmax(1) == y.repeat(draws)).double().mean())


@contextmanager
def clocked() -> Iterator[dict[str, float]]:
    """Seconds that a classifier's draws without gradients take, by their purpose."""
    seconds, draw = defaultdict[str, float](float), jr.JEMClassifier.draw

    def timed(self: Any, images: Any, image_ids: Tensor, draw_ids: Tensor, purpose: str, seed: int) -> Tensor:
        begin = time.perf_counter()
        logits = draw(self, images, image_ids, draw_ids, purpose, seed)
        seconds[purpose] += time.perf_counter() - begin
        return logits

    jr.JEMClassifier.draw = timed  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        jr.JEMClassifier.draw = draw  # type: ignore[method-assign]


def part(name: str, limit: int | None) -> list[dict[str, Any]]:
    """Rows of one classifier, the toolkits' fastest last."""
    steps, count, epsilons = PARTS[name]
    model = jr.load_model("jem-fashion-mnist", steps=steps)
    model = model.with_refinement(chains=1) if steps else model
    x, y = jr.load_images("fashion-mnist", limit=limit or count)
    draws = 1 if model.deterministic else 10
    unit = interleaved({"F": forward(model.network, 2 * x[:BATCH] - 1)}, 5)["F"] / min(BATCH, len(x))
    rows = []

    def row(
        contestant: str, attack: Callable[[Tensor, Tensor, list[float]], Any], judge: Callable[[Any], list[float]]
    ) -> None:
        attack(x[:1], y[:1], epsilons[:1])  # imports and what else happens once
        torch.manual_seed(0)
        np.random.seed(0)
        before = copy(model.spent)
        begin = time.perf_counter()
        with clocked() as seconds:
            found = attack(x, y, epsilons)
            middle = time.perf_counter()
            accuracies = judge(found)
        total = time.perf_counter() - begin
        spent = model.spent.since(before)
        rows.append(
            {
                "model": f"JEM-{steps}", "contestant": contestant, "seconds": total, "attack s": middle - begin,
                "select": seconds["select"] / total, "judge": seconds["judge"] / total,
                "kF": total / unit / 1000, "forwards": spent.forwards, "backwards": spent.backwards,
                "accuracy %": " ".join(f"{100 * a:.1f}" for a in accuracies),
            }
        )  # fmt: skip

    for precision in ("float32", "bf16") if has_bf16("cpu") else ("float32",):
        attacks = [PGD(steps=ITERATIONS, eot=1, keep=1)]
        ours = partial(jr.evaluate, model, norm="linf", attacks=attacks, precision=precision)
        row(f"ours {precision}", lambda a, b, e, run=ours: run(a, b, epsilons=e), lambda curve: list(curve.raw))
    for toolkit in (foolbox, art, torchattacks):
        row(
            toolkit.__name__,
            partial(toolkit, model),
            lambda found: [judged(model, z, y, draws) for z in found],
        )
    fastest = min(r["seconds"] for r in rows if not r["contestant"].startswith("ours"))
    return [{**r, "fastest / this": fastest / r["seconds"]} for r in rows]


def main() -> None:
    names, limit = parts_and_limit(__doc__, PARTS, "200 and 40")
    warnings.simplefilter("ignore")
    rows = []
    for name in names:
        rows += (new := part(name, limit))
        table(new)
    record("evaluation", rows)


if __name__ == "__main__":
    main()
