"""AutoAttack's version for random models on a JEM, judged by itself and by us."""

import jem_robust as jr
from jem_robust.adapters.autoattack import auto_attack, find_backend
from jem_robust.adapters.toolkit_attacks import parse_attack
from jem_robust_attacks import PGD

EPS, ITERATIONS, EOT = 0.1, 5, 2  # half a percent of the work of AutoAttack's own 100 and 20


def main() -> None:
    model = jr.load_model("jem-fashion-mnist", steps=10)
    images, labels = jr.load_images("fashion-mnist", limit=5)

    result = auto_attack(model, images, labels, EPS, iterations=ITERATIONS, eot=EOT)
    moved = (result.candidates[:, 0] != images).flatten(1).any(1)  # it moves what one draw of its was wrong on
    clean = model(images).argmax(1) == labels
    own = (clean & ~moved).float().mean().item()

    same = parse_attack("autoattack:rand", "linf", {"iterations": ITERATIONS, "eot_iter": EOT})
    print(f"accuracy at linf {EPS} on {len(images)} images, AutoAttack from {find_backend()}")
    print(f"  AutoAttack, any draw that was wrong counts: {own:.2f}")
    for name, attack in (("the same attack", same), ("our PGD", PGD("linf", 2 * ITERATIONS, eot=EOT))):
        curve = jr.evaluate(model, images, labels, epsilons=[EPS], attacks=[attack])
        print(f"  jr.evaluate, {name}: {curve.accuracy[0]:.2f} (95 %: {curve.low[0]:.2f} to {curve.high[0]:.2f})")
    print("They may differ because AutoAttack keeps an image as fooled when one of all its draws was wrong, though")
    print("the next draw may be right; jr.evaluate judges what it found on draws that no attack has seen.")


if __name__ == "__main__":
    main()
