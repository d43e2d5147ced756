"""ToolkitAttack and parse_attack beyond the contract table: names, arguments, odd models, isolation."""

import logging
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from jem_robust.adapters.guard import Draws
from jem_robust.adapters.isolation import isolated
from jem_robust.adapters.toolkit_attacks import ToolkitAttack, ToolkitError, is_toolkit_attack, parse_attack
from jem_robust.adapters.toolkit_jobs import REFUSED, parameters
from jem_robust.adapters.toolkit_runs import TOOLKITS
from jem_robust.evaluation.robustness import evaluate
from tests.adapters.world import EPS, batch, global_state, jem, untouched

for toolkit in ("art", "foolbox", "torchattacks"):
    pytest.importorskip(toolkit, reason=f"pip install jem-robust[{toolkit}]")


def test_parsing() -> None:
    attack = parse_attack("art:ProjectedGradientDescent", "Linf", {"max_iter": "20", "eps_step": "2/255", "eot": "4"})
    assert attack == ToolkitAttack(
        "art", "ProjectedGradientDescent", "linf", {"max_iter": 20, "eps_step": 2 / 255}, eot=4
    )
    assert attack.label == "art:ProjectedGradientDescent"
    assert parse_attack("torchattacks:APGD", "l2", {"loss": "ce", "verbose": "false"}).arguments["verbose"] is False
    assert not attack.minimizes
    assert is_toolkit_attack("foolbox:PGD")
    assert not is_toolkit_attack("pgd")


@pytest.mark.parametrize(
    ("text", "norm", "arguments", "match"),
    [
        ("art:ProjectedGradientDecent", "linf", {}, "did you mean ProjectedGradientDescent"),
        ("foolbox:deepfool", "l2", {}, "did you mean .*L2DeepFoolAttack"),
        ("torchattacks:apgd", "linf", {}, "did you mean APGD"),
        ("fooolbox:PGD", "linf", {}, "did you mean foolbox"),
        ("autoattack:standard", "linf", {}, "did you mean rand"),
        ("ProjectedGradientDescent", "linf", {}, "expected toolkit:Attack"),
        ("art:DecisionTreeAttack", "linf", {}, "no attack 'DecisionTreeAttack' for images"),
        ("art:ProjectedGradientDescent", "linf", {"maxiter": 3}, "did you mean max_iter"),
        ("art:ProjectedGradientDescent", "linf", {"eps": 0.1}, "comes from the evaluation"),
        ("art:BoundaryAttack", "l2", {"targeted": True}, "comes from the evaluation"),
        ("art:DeepFool", "l3", {}, "expected a norm"),
        ("art:DeepFool", "l2", {"eot": 0}, "expected eot"),
        ("foolbox:LinfPGD", "linf", {"steps": 0}, "expected steps to be a whole number from 1 up, got 0"),
        ("torchattacks:PGD", "linf", {"steps": -1}, "expected steps to be a whole number from 1 up, got -1"),
        ("torchattacks:PGD", "linf", {"steps": True}, "whole number from 1 up"),
        ("foolbox:LinfPGD", "linf", {"steps": 2.5}, "whole number from 1 up, got 2.5"),
        ("autoattack:rand", "linf", {"iterations": 0}, "whole number from 1 up"),
        ("torchattacks:Square", "linf", {"n_queries": "many"}, "whole number from 1 up, got 'many'"),
        (
            "art:ProjectedGradientDescent",
            "linf",
            {"max_iter": "abc"},
            "whole number from 1 up, got 'abc'.*max_iter=100",
        ),
        ("art:ProjectedGradientDescent", "linf", {"max_iter": -3}, "whole number from 1 up, got -3"),
        ("art:ProjectedGradientDescent", "linf", {"num_random_init": -1}, "whole number from 0 up"),
        ("art:ProjectedGradientDescent", "linf", {"random_eps": "maybe"}, "expected random_eps to be true or false"),
        ("torchattacks:PGD", "linf", {"random_start": 3}, "expected random_start to be true or false"),
        ("torchattacks:PGD", "linf", {"alpha": "-1/255"}, "expected alpha to be a number above 0"),
        ("foolbox:LinfPGD", "linf", {"rel_stepsize": 0}, "expected rel_stepsize to be a number above 0"),
        ("torchattacks:CW", "l2", {"kappa": "wide"}, "expected kappa to be a number"),
        ("foolbox:L2DeepFoolAttack", "l2", {"loss": "foo"}, "expected loss out of logits, crossentropy, got 'foo'"),
        ("foolbox:VirtualAdversarialAttack", "l2", {}, "needs steps.*--attack-arg steps="),
        ("art:SpatialTransformation", "linf", {}, "needs max_translation or max_rotation"),
        *((name, "linf", {}, f"cannot be used here.*(use|pass) .*{name.partition(':')[0]}:") for name in REFUSED),
    ],
)
def test_what_does_not_exist_is_refused_with_near_matches(text: str, norm: str, arguments: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        parse_attack(text, norm, arguments)


@pytest.mark.parametrize(
    ("text", "norm", "eps", "match"),
    [
        ("foolbox:L2PGD", "linf", 0.1, "whose eps is in l2"),
        ("torchattacks:PGDL2", "linf", 0.1, "whose eps is in l2"),
        ("torchattacks:PGD", "l2", 0.1, "whose eps is in linf"),
        ("art:BasicIterativeMethod", "l2", 0.1, "whose eps is in linf"),
        ("art:ProjectedGradientDescent", "l0", 4, "expected a norm out of"),
        ("art:ProjectedGradientDescent", "linf", None, "expected eps, got None"),
        ("foolbox:LinfPGD", "linf", None, "expected eps, got None"),
        ("torchattacks:PGD", "linf", -1, "expected an epsilon"),
    ],
)
def test_what_does_not_fit_the_evaluation_is_refused(text: str, norm: str, eps: Any, match: str) -> None:
    model = jem(0)
    images, labels = batch(model)
    with pytest.raises(ValueError, match=match):
        parse_attack(text, norm)(model, images, labels, eps)


@pytest.mark.parametrize(
    ("text", "arguments", "match"),
    [
        ("art:ProjectedGradientDescent", {"eps_step": [1, 2]}, r"ProjectedGradientDescent.*eps_step.*max_iter=100"),
        ("art:BoundaryAttack", {"init_size": -1}, "init_size"),
        ("torchattacks:APGD", {"loss": "foo"}, "'loss': 'foo'"),
        ("foolbox:VirtualAdversarialAttack", {"steps": 3}, "whose eps is in l2"),
        ("torchattacks:TIFGSM", {}, "3 channels, got 1"),
    ],
)
def test_arguments_only_the_toolkit_can_check_are_bad_usage_too(text: str, arguments: Any, match: str) -> None:
    model = jem(0)
    images, labels = batch(model)
    with pytest.raises(ValueError, match=match):
        parse_attack(text, "l2" if "Boundary" in text else "linf", arguments)(model, images, labels, 0.1)


def test_modules_a_toolkit_misses_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = jem(0)
    images, labels = batch(model)
    monkeypatch.setitem(sys.modules, "cma", None)
    with pytest.raises(ImportError, match=r"art:ThresholdAttack needs cma.*pip install cma"):
        parse_attack("art:ThresholdAttack", "linf")(model, images, labels, 0.1)


SMALL = {
    "max_iter": 2, "steps": 2, "n_queries": 3, "binary_search_steps": 1, "num_trial": 2, "sample_size": 3,
    "max_eval": 4, "init_eval": 2, "init_size": 3, "max_translation": 1, "iterations": 2, "eot_iter": 1, "nb_steps": 2,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("toolkit", TOOLKITS)
def test_every_attack_offered_runs_or_says_why_not(toolkit: str) -> None:
    model = jem(0)
    images, labels = batch(model)
    for name, kind in TOOLKITS[toolkit].names().items():
        refused = f"{toolkit}:{name}" in REFUSED
        arguments = {} if refused else {k: v for k, v in SMALL.items() if k in parameters(kind)}
        for norm in ("linf", "l2"):
            try:
                attack = ToolkitAttack(toolkit, name, norm, arguments)
                attack.search(model, images, labels, None if attack.minimizes else EPS[norm])
            except (ValueError, ImportError) as error:
                assert refused or "expected" in str(error) or "pip install" in str(error), (name, error)  # noqa: PT017
            else:
                assert not refused, name
                break


class Split:
    """Every other draw sees other pixels, so that the loss of mean logits is not the mean loss."""

    bounds, deterministic = (0.0, 1.0), False

    def draw(self, x: Tensor, ids: Tensor, draws: Tensor, *keys: Any) -> Tensor:
        pixels = x.flatten(1)
        return 9 * torch.where((draws % 2 == 0).unsqueeze(1), pixels[:, :3], pixels[:, 3:6] - 0.4)


def test_art_attacks_average_gradients_and_not_logits() -> None:
    """One FGSM step in l2 follows the mean over draws of the gradients of the cross-entropy."""
    images = 0.3 + 0.4 * torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    radius, labels = 1e-2, torch.tensor([1])
    attack = parse_attack("art:FastGradientMethod", "l2", {"eot": 4})
    found = attack.search(Split(), images, labels, radius)[0][:, 0]
    x = images.clone().requires_grad_()
    logits = [Split().draw(x, labels, torch.tensor([draw])) for draw in range(2)]
    loss = sum(torch.nn.functional.cross_entropy(part, labels) for part in logits)
    gradient = torch.autograd.grad(loss, x)[0]  # type: ignore[arg-type]
    torch.testing.assert_close(found - images, radius * gradient / gradient.norm(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("text", ["art:ProjectedGradientDescent", "foolbox:LinfPGD", "torchattacks:PGD"])
def test_one_image_at_a_time_nothing_depends_on_the_others(text: str) -> None:
    model = jem(1)
    images, labels = batch(model)
    random_start = {"num_random_init": 1} if text.startswith("art") else {}
    steps = {"max_iter" if text.startswith("art") else "steps": 3}
    attack = parse_attack(text, "linf", {**steps, **random_start})
    settings: Any = {"epsilons": [0.05], "attacks": [attack], "draws": 4, "select_draws": 3, "batch_size": 1}
    whole = evaluate(model, images, labels, **settings)
    part = evaluate(model, images[:2], labels[:2], **settings)
    assert np.array_equal(whole.p_correct[:, :2], part.p_correct)
    assert np.array_equal(whole.adversarials[:, :2], part.adversarials)


def test_the_same_attack_twice_never_breaks_more_than_it_attacked() -> None:
    model = jem(0)
    images, labels = batch(model, 40)
    attack = parse_attack("torchattacks:PGD", "linf", {"steps": 2})
    curve = evaluate(model, images, labels, epsilons=[0, 0.01, 0.02, 0.04, 0.3], attacks=[attack, attack])
    rows = [row["attacks"] for row in curve.per_attack]
    assert all(a["broke"] <= a["attacked"] <= 40 for row in rows for a in row)
    assert rows[0][0]["attacked"] == 0
    assert [row[0]["attacked"] for row in rows[1:]] == [round(40 * curve.clean)] * 4
    for row, raw in zip(rows, curve.raw, strict=True):
        assert sum(a["broke"] for a in row) == round(40 * (curve.clean - raw))


@pytest.mark.parametrize("text", ["art:CarliniL2Method", "foolbox:L2DeepFoolAttack", "torchattacks:DeepFool"])
def test_smallest_perturbations_without_eps(text: str) -> None:
    assert parse_attack(text, "l2").minimizes
    model = jem(0)
    images, labels = batch(model)
    result = parse_attack(text, "l2")(model, images, labels)
    assert bool(torch.isfinite(result.distances[result.success]).all())
    assert bool((result.adversarials >= 0).all() and (result.adversarials <= 1).all())


def test_nothing_to_do() -> None:
    model = jem(1)
    images, labels = batch(model)
    for text in ("art:FastGradientMethod", "foolbox:LinfPGD", "torchattacks:FGSM", "autoattack:rand"):
        attack = parse_attack(text)
        assert torch.equal(attack(model, images, labels, 0).adversarials, images)
        assert attack(model, images[:0], labels[:0], 0.1).adversarials.shape == (0, 1, 8, 8)


def test_other_models_bounds_and_types() -> None:
    weight = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))

    class Linear:
        bounds = (-1.0, 3.0)

        def __call__(self, x: Tensor) -> Tensor:
            assert x.dtype == torch.float64
            return x.flatten(1) @ weight.double()

    images = 4 * torch.rand(3, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) - 1
    labels = Linear()(images).argmax(1)
    for text in ("art:ProjectedGradientDescent", "foolbox:LinfFastGradientAttack", "torchattacks:FGSM"):
        result = parse_attack(text, "linf")(Linear(), images, labels.tolist(), "1/2")
        assert result.success.all()
        assert result.adversarials.dtype == torch.float64
        assert float(result.distances.max()) == pytest.approx(0.5, abs=1e-6)
        assert float(result.adversarials.min()) >= -1
        with torch.inference_mode():
            parse_attack(text, "linf").search(Linear(), images.clone(), labels, 0.5)


def test_fewer_pixels_than_the_toolkit_changed() -> None:
    model = jem(0)
    images, labels = batch(model)
    candidates, _ = ToolkitAttack("torchattacks", "GN", "l0", {"std": 0.5}).search(model, images, labels, 5)
    assert ((candidates[:, 0] != images).flatten(1).sum(1) == 5).all()


def test_a_broken_network_is_reported_and_not_robust() -> None:
    class Broken:
        bounds = (0.0, 1.0)

        def __call__(self, x: Tensor) -> Tensor:
            logits = x.flatten(1)[:, :3] * 1.0
            return torch.where(x.flatten(1)[:, 3:4] > 0.5, torch.nan, logits)

    images = torch.full((2, 1, 8, 8), 0.25)
    images[1, 0, 0, 3] = 0.75
    for text in ("art:ProjectedGradientDescent", "foolbox:LinfPGD", "torchattacks:PGD"):
        result = parse_attack(text, "linf")(Broken(), images, [0, 0], 0.01)
        assert result.success[1]
        assert result.nonfinite is not None
        assert result.nonfinite.tolist() == [False, True]
        assert torch.isfinite(result.adversarials).all()


def test_errors_of_a_toolkit_name_it() -> None:
    class Fails:
        bounds, deterministic = (0.0, 1.0), True

        def draw(self, x: Tensor, ids: Tensor, draws: Tensor, *keys: Any) -> Tensor:
            if x.requires_grad:
                raise KeyError("lost")
            return x.flatten(1)[:, :3]

    images, labels = batch(jem(0))
    outside = global_state()
    with pytest.raises(
        ToolkitError, match=r"foolbox:LinfPGD failed within foolbox .KeyError.*steps=40.*another attack"
    ):
        parse_attack("foolbox:LinfPGD", "linf")(Fails(), images, torch.zeros_like(labels), 0.5)
    assert global_state() == outside


def test_eot_progress_and_noise_keyed_by_image() -> None:
    model = jem(1)
    images, labels = batch(model)
    seen: list[int] = []
    once, many = (parse_attack("torchattacks:FGSM", "linf", {"eot": n}) for n in (1, 8))
    first = once.search(model, images, labels, 0.1, seed=1, progress=seen.append)[0]
    assert sum(seen) == len(images)
    assert torch.equal(first, once.search(model, images, labels, 0.1, seed=1, image_ids=[0, 1, 2, 3])[0])
    result = many(model, images, labels, EPS["linf"])
    assert bool((result.queries >= 8).all())
    with model.frozen_noise(3), untouched(model, images):
        many(model, images, labels, EPS["linf"])


def test_images_a_foolbox_attack_finds_no_start_for_stay_as_they_are() -> None:
    class Constant:
        bounds, deterministic = (0.0, 1.0), True

        def draw(self, x: Tensor, *keys: Any) -> Tensor:
            wrong = (x.flatten(1).mean(1, keepdim=True) - 0.9).sign()  # right for everything that noise can reach
            return torch.cat([-wrong, wrong, -wrong - 1], 1)

    images = torch.rand(2, 1, 8, 8)
    attack = ToolkitAttack("foolbox", "PointwiseAttack", "l0")
    candidates, _ = attack.search(Constant(), images, torch.tensor([0, 1]), 5)
    assert torch.equal(candidates[:, 0], images)


def test_isolation_restores_and_repeats() -> None:
    before, handlers, trace = global_state(), logging.root.handlers[:], sys.gettrace()
    values = []
    for _ in range(2):
        with isolated(5):
            logging.info("Foolbox does this")
            sys.settrace(lambda *a: None)
            drawn = [torch.rand(1).item(), np.random.rand(), random.random(), np.random.RandomState().rand()]
            assert isinstance(np.random.mtrand._rand, np.random.RandomState)
            values.append(drawn)
    assert values[0] == values[1]
    assert global_state() == before
    assert logging.root.handlers == handlers
    assert sys.gettrace() is trace


def test_attacks_that_leave_the_box_see_its_edge() -> None:
    model = jem(0)
    images, _ = batch(model)
    draws = Draws(model, len(images), images, 0)
    x = (images + 2).requires_grad_()
    draws(x).sum().backward()
    assert x.grad is not None
    assert x.grad.abs().max() > 0
    torch.testing.assert_close(draws(images + 2), model(torch.ones_like(images)))
