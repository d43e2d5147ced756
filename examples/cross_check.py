"""The same PGD through our code, ART, Foolbox and torchattacks: eps .05, 10 steps of .0125, started at the image.

python examples/cross_check.py [K] [IMAGES]: accuracy of the last iterates on JEM-K, docs/cross_check.md has its tables.
"""

import sys

from art.attacks.evasion import ProjectedGradientDescentPyTorch

import jem_robust as jr
from jem_robust.adapters.art import JEMARTClassifier
from jem_robust.adapters.foolbox import to_foolbox
from jem_robust.adapters.torchattacks import to_torchattacks
from jem_robust.evaluation.verdict import bootstrap_interval, score
from jem_robust_attacks import PGD

EPS, STEPS, STEP = 0.05, 10, 0.0125


def main(k: int = 0, count: int = 20) -> None:
    import foolbox
    import torch
    import torchattacks

    model = jr.load_model("jem-fashion-mnist", steps=k)
    x, y = jr.load_images("fashion-mnist", limit=count)
    ours = PGD("linf", STEPS, eot=1, step_size=STEP, keep=0, targets=0, early_stop=False)
    theirs = ProjectedGradientDescentPyTorch(
        JEMARTClassifier(model), eps=EPS, eps_step=STEP, max_iter=STEPS, verbose=False
    )
    fool = foolbox.attacks.LinfPGD(abs_stepsize=STEP, steps=STEPS, random_start=False)
    found = {
        "jem-robust": ours.search(model, x, y, EPS)[0][:, 0],
        "ART": torch.from_numpy(theirs.generate(x=x.numpy(), y=y.numpy())),
        "Foolbox": fool.run(to_foolbox(model), x, y, epsilon=EPS),
        "torchattacks": torchattacks.PGD(to_torchattacks(model), EPS, STEP, STEPS, random_start=False)(x, y),
    }
    draws = 1 if model.deterministic else 10
    print(f"| JEM-{k}, last iterate of | accuracy, n = {count}, draws = {draws} | 95 % interval |\n| --- | --- | --- |")
    for name, images in found.items():
        right = score(model, images.detach(), y, torch.arange(count), draws, "judge", 0, 512).correct.double() / draws
        low, high = bootstrap_interval(right.numpy()[None], 0)
        print(f"| {name} | {float(right.mean()):.1%} | {100 * low[0]:.1f}-{high[0]:.1%} |")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
