"""An ART pipeline with a JEM in it: the classifier is the one line that changes."""

from art.attacks.evasion import ProjectedGradientDescent

import jem_robust as jr
from jem_robust.adapters.art import JEMARTClassifier
from jem_robust.adapters.toolkit_attacks import parse_attack
from jem_robust_attacks import PGD

EPS, ITERATIONS, EOT = 0.1, 5, 2


def main() -> None:
    model = jr.load_model("jem-fashion-mnist", steps=10)
    images, labels = jr.load_images("fashion-mnist", limit=5)

    classifier = JEMARTClassifier(model, eot=EOT)  # was: PyTorchClassifier(network, loss, input_shape, nb_classes)
    pgd = ProjectedGradientDescent(classifier, eps=EPS, eps_step=EPS / 2, max_iter=ITERATIONS, verbose=False)
    found = pgd.generate(x=images.numpy(), y=labels.numpy())
    own = (classifier.predict(found).argmax(1) == labels.numpy()).mean()

    same = parse_attack("art:ProjectedGradientDescent", "linf", {"max_iter": ITERATIONS, "eot": EOT})
    print(f"accuracy at linf {EPS} on {len(images)} images")
    print(f"  ART, last iterate, one draw an image: {own:.2f}")
    for name, attack in (("the same attack", same), ("our PGD", PGD("linf", ITERATIONS, eot=EOT))):
        curve = jr.evaluate(model, images, labels, epsilons=[EPS], attacks=[attack])
        print(f"  jr.evaluate, {name}: {curve.accuracy[0]:.2f} (95 %: {curve.low[0]:.2f} to {curve.high[0]:.2f})")
    print("They may differ because ART asks a random classifier once; jr.evaluate selects the worst candidate (the")
    print("clean image included) on 10 draws and judges it on 10 others; our PGD hands over its best iterates too.")


if __name__ == "__main__":
    main()
