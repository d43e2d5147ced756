import pytest

import jem_robust as jr
from jem_robust.evaluation.estimate import estimate
from jem_robust_attacks import PGD
from tests.worlds import images, quick, smooth_cnn


@pytest.mark.parametrize("steps", [0, 2])
def test_the_estimate_is_of_the_size_of_what_happens(steps):
    model = jr.JEMClassifier(smooth_cnn(), quick(noise=0.3)).with_refinement(steps=steps)
    x = images(30, seed=3)
    y = model.with_refinement(steps=0)(x).argmax(1)
    arguments = {
        "norm": "linf", "epsilons": [0, 0.02, 0.05, 0.1], "attacks": [PGD(steps=10, eot=1)], "draws": 6,
        "select_draws": 4, "seed": 0, "batch_size": None, "attack_chains": None,
    }  # fmt: skip
    expected = estimate(model, x, y, probe_images=4, **arguments)
    spent = jr.evaluate(model, x, y, **arguments).about["spent"]
    done = spent["forwards"] + spent["backwards"]
    assert 0.4 < expected.rows / done < 2.5
    assert expected.seconds > 0
    assert expected.memory > 0
    assert expected.probed == 4


def test_more_work_is_estimated_for_more_of_everything():
    model = jr.JEMClassifier(smooth_cnn(), quick())
    x = images(8)
    base = {
        "norm": "linf", "epsilons": [0.1], "attacks": [PGD(steps=4, eot=1)], "draws": 2, "select_draws": 2, "seed": 0,
        "batch_size": None, "attack_chains": None, "probe_images": 2,
    }  # fmt: skip
    rows = estimate(model, x, [0] * 8, **base).rows
    for change in ({"epsilons": [0.1, 0.2]}, {"attacks": [PGD(steps=8, eot=1)]}, {"draws": 4}, {"select_draws": 4}):
        assert estimate(model, x, [0] * 8, **{**base, **change}).rows > rows
    assert estimate(model, x, [0] * 8, **{**base, "attack_chains": 1}).rows < rows


@pytest.mark.parametrize(
    ("text", "norm", "arguments"),
    [
        ("art:SquareAttack", "linf", {"max_iter": 3}), ("art:SquareAttack", "linf", {"max_iter": 60}),
        ("art:ProjectedGradientDescent", "linf", {"max_iter": 20}), ("art:CarliniL2Method", "l2", {"max_iter": 5}),
        ("art:HopSkipJump", "l2", {"max_iter": 5, "max_eval": 40, "init_eval": 10}), ("foolbox:LinfPGD", "linf", {}),
        ("foolbox:L2CarliniWagnerAttack", "l2", {"steps": 20}), ("torchattacks:FGSM", "linf", {}),
        ("torchattacks:Square", "linf", {"n_queries": 50}), ("torchattacks:EOTPGD", "linf", {"eot_iter": 3}),
        ("torchattacks:FGSM", "linf", {"eot": 30}),
    ],
)  # fmt: skip
def test_the_arguments_of_toolkit_attacks_count(text, norm, arguments):
    pytest.importorskip(text.partition(":")[0], reason="a toolkit that is not installed")
    from jem_robust.adapters.toolkit_attacks import parse_attack

    model = jr.JEMClassifier(smooth_cnn(), quick(), input_shape=(1, 5, 5), num_classes=3)
    x = images(12, seed=3).float()
    settings = {
        "norm": norm, "epsilons": [0.02, 0.05], "attacks": [parse_attack(text, norm, arguments)], "draws": 2,
        "select_draws": 2, "seed": 0, "batch_size": None, "attack_chains": None,
    }  # fmt: skip
    y = model.with_refinement(steps=0)(x).argmax(1)
    expected = estimate(model, x, y, probe_images=4, **settings).rows
    spent = jr.evaluate(model, x, y, **settings).about["spent"]
    assert 0.4 < expected / (spent["forwards"] + spent["backwards"]) < 2.5
