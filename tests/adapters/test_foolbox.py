"""to_foolbox: the guards around the model, and what Foolbox 3.3.4 gets wrong."""

import pytest
import torch
from torch import nn

from tests.adapters.world import CLASSES, assert_eot_averages_gradients, batch, jem, untouched

pytest.importorskip("foolbox", reason="pip install jem-robust[foolbox]")

from foolbox import attacks
from foolbox.distances import LpDistance
from foolbox.models.pytorch import PyTorchModel

from jem_robust.adapters.foolbox import to_foolbox
from jem_robust.adapters.toolkit_jobs import REFUSED, parameters
from jem_robust.adapters.toolkit_runs import foolbox_attacks


@pytest.mark.parametrize("steps", [0, 2])
def test_it_is_a_foolbox_model_of_the_model_itself(steps: int) -> None:
    model = jem(steps)
    images, _ = batch(model)
    with untouched(model, images, everything=False):
        wrapped = to_foolbox(model)
        assert isinstance(wrapped, PyTorchModel)
        assert tuple(wrapped.bounds) == (0.0, 1.0)
        expected = model.reseed(1)(images)
        model.reseed(1)
        assert torch.equal(wrapped(images), expected)
        assert not wrapped(images).requires_grad
        assert wrapped(images[:0]).shape == (0, CLASSES)
        model.reseed(0)


def test_eot_averages_where_a_gradient_is_asked_for() -> None:
    model = jem(1)
    images, _ = batch(model)
    wrapped = to_foolbox(model, eot=3)
    model.reseed(2)
    expected = torch.stack([model(images) for _ in range(3)]).mean(0)
    model.reseed(2)
    torch.testing.assert_close(wrapped(images.clone().requires_grad_()), expected)
    model.reseed(2)
    assert torch.equal(wrapped(images), model.reseed(2)(images))
    with pytest.raises(ValueError, match="eot"):
        to_foolbox(model, eot=0)


@pytest.mark.xfail(
    strict=True,
    reason="Foolbox 3.3.4 and eagerpy 0.30.0: the attack applies its loss to one batch of logits, not to a draw",
)
def test_eot_averages_the_gradients_of_the_loss() -> None:
    assert_eot_averages_gradients(to_foolbox)


@pytest.mark.parametrize("shift", [0.5, -0.5])
def test_images_out_of_range_are_refused_in_words(shift: float) -> None:
    model = jem(0)
    images, labels = batch(model)
    with pytest.raises(ValueError, match=r"expected images in \[0, 1\]"):
        attacks.LinfPGD(steps=1)(to_foolbox(model), images + shift, labels, epsilons=0.1)
    # Off by rounding is let through, which Foolbox's own assert is not lenient enough for.
    near = images.clone()
    near[0, 0, 0, 0] = 1 + 5e-7
    attacks.LinfPGD(steps=1)(to_foolbox(model), near, labels, epsilons=0.1)


ALL = {name: attack for name, attack in foolbox_attacks().items() if f"foolbox:{name}" not in REFUSED}


@pytest.mark.parametrize("name", ALL)
def test_images_that_require_a_gradient_are_refused_in_words(name: str) -> None:
    model = jem(1)
    images, labels = batch(model)
    images.requires_grad_()
    if "BrendelBethge" in name:
        pytest.importorskip("numba", reason="which this attack needs")
    small = {"steps": 2, "distance": LpDistance(2)}
    made = ALL[name](**{key: value for key, value in small.items() if key in parameters(ALL[name])})
    with pytest.raises(ValueError, match=r"pass images.detach\(\)"):
        made(to_foolbox(model), images, labels, epsilons=0.1)
    assert images.grad is None


def test_the_boundary_attack_survives_images_wrong_from_the_start() -> None:
    model = jem(0)
    images, labels = batch(model)
    attack = attacks.BoundaryAttack(steps=3)
    found, _, success = attack(to_foolbox(model), images, labels, epsilons=None)
    assert torch.isfinite(found).all()
    assert success.all()
    assert torch.equal(found[3], images[3])


def test_other_models_are_refused() -> None:
    with pytest.raises(TypeError, match="expected a JEMClassifier, got Linear"):
        to_foolbox(nn.Linear(2, 2))
