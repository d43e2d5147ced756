"""A torchattacks pipeline with a JEM in it: the model is the one line that changes."""

import torch
from torchattacks import EOTPGD

import jem_robust as jr
from jem_robust.adapters.toolkit_attacks import parse_attack
from jem_robust.adapters.torchattacks import to_torchattacks
from jem_robust_attacks import PGD

EPS, STEPS = 0.1, 5


def main() -> None:
    model = jr.load_model("jem-fashion-mnist", steps=10)
    images, labels = jr.load_images("fashion-mnist", limit=5)

    wrapped = to_torchattacks(model)  # was: network
    found = EOTPGD(wrapped, eps=EPS, alpha=EPS / 2, steps=STEPS, eot_iter=2)(images, labels)
    with torch.no_grad():
        own = (wrapped(found).argmax(1) == labels).float().mean().item()

    same = parse_attack("torchattacks:EOTPGD", "linf", {"steps": STEPS, "eot_iter": 2})
    print(f"accuracy at linf {EPS} on {len(images)} images")
    print(f"  torchattacks, last iterate, one draw an image: {own:.2f}")
    for name, attack in (("the same attack", same), ("our PGD", PGD("linf", STEPS, eot=2))):
        curve = jr.evaluate(model, images, labels, epsilons=[EPS], attacks=[attack])
        print(f"  jr.evaluate, {name}: {curve.accuracy[0]:.2f} (95 %: {curve.low[0]:.2f} to {curve.high[0]:.2f})")
    print("They may differ because torchattacks hands over its last iterate for one draw to judge: another draw may")
    print("say otherwise, and an earlier iterate or the clean image may be worse; jr.evaluate looks at both afresh.")


if __name__ == "__main__":
    main()
