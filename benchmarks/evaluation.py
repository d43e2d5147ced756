"""Time to the same robustness curve: ours beside toolkits' PGD looped over epsilons, on the same wrapped model.

    python benchmarks/evaluation.py                   # JEM-0 and JEM-10; five minutes on two idle cores
    python benchmarks/evaluation.py --parts jem0 --limit 50

Needs foolbox, adversarial-robustness-toolbox and torchattacks. All run PGD of 40 iterations, steps of 2.5 * eps / 40.
Ours is timed with selection and judging, the toolkits' attacks alone. Accuracies are over all images, of the last
iterates (theirs) and the selected candidates (ours), on the same judge draws. Nothing is run twice, for the attacks of
one curve take minutes; `load` in the record says what else the machine did.
"""

import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from measure import forward, interleaved, parts_and_limit, record, table
from torch import Tensor

import jem_robust as jr
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


def part(name: str, limit: int | None) -> list[dict[str, Any]]:
    """Rows of one classifier, the toolkits' fastest last."""
    steps, count, epsilons = PARTS[name]
    model = jr.load_model("jem-fashion-mnist", steps=steps)
    model = model.with_refinement(chains=1) if steps else model
    x, y = jr.load_images("fashion-mnist", limit=limit or count)
    draws = 1 if model.deterministic else 10
    unit = interleaved({"F": forward(model.network, 2 * x[:BATCH] - 1)}, 5)["F"] / min(BATCH, len(x))
    rows = []

    def row(contestant: str, run: Callable[[], list[float]]) -> None:
        torch.manual_seed(0)
        np.random.seed(0)
        before = (model.spent.forwards, model.spent.backwards)
        begin = time.perf_counter()
        accuracies = run()
        seconds = time.perf_counter() - begin
        spent = (model.spent.forwards - before[0], model.spent.backwards - before[1])
        rows.append(
            {
                "model": f"JEM-{steps}", "contestant": contestant, "seconds": seconds,
                "kF": seconds / unit / 1000, "forwards": spent[0], "backwards": spent[1],
                "accuracy %": " ".join(f"{100 * a:.1f}" for a in accuracies),
            }
        )  # fmt: skip

    def toolkit(attack: Any) -> None:
        found: list[Tensor] = []

        def run() -> list[float]:
            found.extend(attack(model, x, y, epsilons))
            return []

        row(attack.__name__, run)
        rows[-1]["accuracy %"] = " ".join(f"{100 * judged(model, z, y, draws):.1f}" for z in found)

    def ours(precision: str) -> list[float]:
        attack = PGD(steps=ITERATIONS, eot=1)
        return list(jr.evaluate(model, x, y, "linf", epsilons, [attack], precision=precision).raw)

    for precision in ("float32", "bf16"):
        row(f"ours {precision}", partial(ours, precision))
    for contestant in (foolbox, art, torchattacks):
        toolkit(contestant)
    fastest = min(r["seconds"] for r in rows[2:])
    return [{**r, "fastest toolkit / this": fastest / r["seconds"]} for r in rows]


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
