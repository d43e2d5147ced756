"""A Foolbox pipeline with a JEM in it: the model is the one line that changes."""

import jem_robust as jr
from jem_robust.adapters.foolbox import to_foolbox
from jem_robust.adapters.toolkit_attacks import parse_attack
from jem_robust_attacks import PGD

EPS, STEPS = 1.0, 5


def main() -> None:
    from foolbox.attacks import L2PGD  # after the adapter, which silences Foolbox's warning about SciPy

    model = jr.load_model("jem-fashion-mnist", steps=10)
    images, labels = jr.load_images("fashion-mnist", limit=5)

    fmodel = to_foolbox(model, eot=2)  # was: foolbox.PyTorchModel(network, bounds=(0, 1))
    _, _, success = L2PGD(steps=STEPS, rel_stepsize=0.5)(fmodel, images, labels, epsilons=EPS)
    own = 1 - success.float().mean().item()

    same = parse_attack("foolbox:L2PGD", "l2", {"steps": STEPS, "rel_stepsize": 0.5, "eot": 2})
    print(f"accuracy at l2 {EPS} on {len(images)} images")
    print(f"  Foolbox, one draw an image: {own:.2f}")
    for name, attack in (("the same attack", same), ("our PGD", PGD("l2", STEPS, eot=2))):
        curve = jr.evaluate(model, images, labels, norm="l2", epsilons=[EPS], attacks=[attack])
        print(f"  jr.evaluate, {name}: {curve.accuracy[0]:.2f} (95 %: {curve.low[0]:.2f} to {curve.high[0]:.2f})")
    print("They may differ because Foolbox asks the random classifier once and takes its luck for success: an image is")
    print("fooled where the one draw in ten that is wrong comes up; jr.evaluate counts shares of draws.")


if __name__ == "__main__":
    main()
