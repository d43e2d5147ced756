from copy import copy

import pytest

import jem_robust as jr
from jem_robust.evaluation.estimate import estimate
from jem_robust.evaluation.members import Transfer
from jem_robust.evaluation.prices import Cost, Unit
from jem_robust_attacks import PGD, BoundaryAttack
from tests.worlds import images, quick, smooth_cnn


def expected_and_done(model, x, y, tried, **arguments):
    expected = estimate(model, x, y, probe_images=tried, **arguments)
    spent = jr.evaluate(model, x, y, **arguments).about["spent"]
    return expected, spent["forwards"] + spent["backwards"]


ARGUMENTS = {
    "norm": "linf", "epsilons": [0, 4 / 255, 8 / 255, 16 / 255], "draws": 8, "select_draws": 4, "seed": 0,
    "batch_size": None, "attack_chains": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "attacks", "changes"),
    [
        (0, [PGD(steps=20)], {}),
        (0, [PGD("l2", steps=10, restarts=4)], {"norm": "l2", "epsilons": [0.5, 1]}),
        (0, [BoundaryAttack("l2", max_queries=100)], {"norm": "l2", "epsilons": [0.5, 1]}),
        (2, [Transfer(PGD(steps=5, eot=1)), PGD(steps=5, eot=1)], {}),
        (2, [PGD(steps=5)], {"attack_chains": 2, "epsilons": [0, 0.05]}),
        (1, ["pgd"], {"epsilons": [0]}),
    ],
    ids=str,
)
def test_the_work_is_known_within_a_quarter(steps, attacks, changes):
    model = jr.load_model("jem-fashion-mnist", steps=steps).with_refinement(chains=3)
    x, y = jr.load_images("fashion-mnist", limit=30)
    before = copy(model.spent)
    expected, done = expected_and_done(model, x, y, 15, attacks=attacks, **{**ARGUMENTS, **changes})
    assert expected.probed == 15
    assert expected.seconds > 0
    assert expected.memory > 0
    assert 0.75 < expected.rows / done < 1.25
    assert done < model.spent.since(before).forwards + model.spent.since(before).backwards  # the trial is not in it


def test_images_tried_are_taken_from_all_classes():
    model = jr.load_model("jem-fashion-mnist", steps=0)
    x, y = jr.load_images("fashion-mnist", limit=40)
    order = y.argsort()
    arguments = {**ARGUMENTS, "attacks": [PGD(steps=10)]}
    expected, done = expected_and_done(model, x[order], y[order], 20, **arguments)
    assert 0.75 < expected.rows / done < 1.25


def test_a_call_costs_something_and_its_images_do():
    unit = Unit(Cost(3.0, 0.01), 0.1)
    cost = unit.of([1, 128], 2.0)
    assert (cost.rows, cost.seconds) == (pytest.approx(258 * 3.0), pytest.approx(258 * 0.01 + 0.1 + 4 * 0.1))
    assert Cost(1.0, 2.0).extended(Cost(3.0, 3.0), 2.0) == Cost(5.0, 4.0)


def test_more_work_is_estimated_for_more_of_everything():
    model = jr.JEMClassifier(smooth_cnn(), quick())
    x = images(8)
    y = model.with_refinement(steps=0)(x).argmax(1)
    base = {
        "norm": "linf", "epsilons": [0.1], "attacks": [PGD(steps=4, eot=1)], "draws": 2, "select_draws": 2, "seed": 0,
        "batch_size": None, "attack_chains": None, "probe_images": 4,
    }  # fmt: skip
    rows = estimate(model, x, y, **base).rows
    for change in ({"epsilons": [0.1, 0.2]}, {"attacks": [PGD(steps=8, eot=1)]}, {"draws": 4}, {"select_draws": 4}):
        assert estimate(model, x, y, **{**base, **change}).rows > rows
    assert estimate(model, x, y, **{**base, "attack_chains": 1}).rows < rows


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
    assert 0.6 < expected / (spent["forwards"] + spent["backwards"]) < 1.6
