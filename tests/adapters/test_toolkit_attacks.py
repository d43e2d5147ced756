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
    model = jem(0)
    images, labels = batch(model)
    outside = global_state()
    with pytest.raises(ToolkitError, match="foolbox:DatasetAttack failed within foolbox"):
        parse_attack("foolbox:DatasetAttack", "l2")(model, images, labels, 0.5)
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
