"""to_torchattacks: the guards around the model."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jem_robust import JEMClassifier, Refinement
from tests.adapters.world import assert_eot_averages_gradients, batch, jem, untouched

torchattacks = pytest.importorskip("torchattacks", reason="pip install --no-deps torchattacks==3.5.1")

from jem_robust.adapters.torchattacks import to_torchattacks  # noqa: E402


class Pooled(nn.Module):
    """No parameters to read a device off."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x.mean((1, 2, 3)), x.amax((1, 2, 3)), x.amin((1, 2, 3))], 1)


def test_it_computes_what_the_model_computes() -> None:
    model = jem(1)
    images, _ = batch(model)
    wrapped: Any = to_torchattacks(model)
    expected = model.reseed(1)(images)
    model.reseed(1)
    assert torch.equal(wrapped(images), expected)
    assert wrapped.model is model
    assert [id(p) for p in wrapped.parameters()] == [id(p) for p in model.parameters()]


def test_modes_and_gradients_are_the_callers() -> None:
    model = jem(1)
    images, labels = batch(model)
    x = images.clone().requires_grad_()
    with untouched(model, images, everything=False):
        wrapped = to_torchattacks(model)
        wrapped.train().eval()
        wrapped.zero_grad()
        attack = torchattacks.PGD(wrapped, eps=0.1, steps=2)
        attack.set_model_training_mode(model_training=True, batchnorm_training=True)
        attack(x, labels)
    assert x.grad is None


ALL = [name for name in torchattacks.__all__ if name not in ("MultiAttack", "LGV")]


@pytest.mark.parametrize("name", ALL)
def test_images_out_of_range_are_refused_and_not_clipped(name: str) -> None:
    model = jem(0)
    images, labels = batch(model)
    attack = getattr(torchattacks, name)(to_torchattacks(model))
    for bad in (255 * images, images - 0.5, images * torch.nan):
        with pytest.raises(ValueError, match=r"expected (finite )?images in \[0, 1\]"):
            attack(bad, labels)


def test_images_within_rounding_are_let_through_and_other_calls_are_not_looked_at() -> None:
    model = jem(0)
    images, labels = batch(model)
    wrapped = to_torchattacks(model)
    near = images.clone()
    near[0, 0, 0, 0] = 1 + 5e-7
    assert torchattacks.MultiAttack([torchattacks.PGD(wrapped, steps=1)] * 2)(near, labels).shape == images.shape
    wrapped.eval()


@pytest.mark.xfail(
    strict=True,
    reason="torchattacks 3.5.1: the attack applies its loss to one batch of logits, not to each draw; use EOTPGD",
)
def test_eot_averages_the_gradients_of_the_loss() -> None:
    assert_eot_averages_gradients(to_torchattacks)


def test_a_network_without_parameters_has_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    model = JEMClassifier(Pooled(), Refinement(steps=0))
    images, _ = batch(jem(0))
    attack = torchattacks.FGSM(to_torchattacks(model))
    assert attack.device == torch.device("cpu")
    assert attack(images, torch.zeros(4, dtype=torch.int64)).shape == images.shape
    assert capsys.readouterr().out == ""
