"""SGLDRefinement in front of somebody else's ART classifier."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from jem_robust import JEMClassifier, Refinement
from tests.adapters.world import CLASSES, SHAPE, TinyNet, batch, jem, untouched

pytest.importorskip("art", reason="pip install jem-robust[art]")

from art.attacks.evasion import ProjectedGradientDescent
from art.estimators.classification import PyTorchClassifier

from jem_robust.adapters.art import JEMARTClassifier, SGLDRefinement


class Quadratic(nn.Module):
    """log p(x) = -2 |x|^2 / 2: one SGLD step multiplies x by 1 - 2a."""

    def forward(self, x: Tensor) -> Tensor:
        return -x.square().flatten(1).sum(1)


def somebody(defence: SGLDRefinement | None) -> PyTorchClassifier:
    return PyTorchClassifier(
        TinyNet().eval(), nn.CrossEntropyLoss(), SHAPE, CLASSES, clip_values=(0.0, 1.0), device_type="cpu",
        preprocessing=None, preprocessing_defences=defence,
    )  # fmt: skip


@pytest.mark.parametrize(("gradient", "factor"), [("exact", 0.8), ("straight-through", 1.0)])
def test_a_quadratic_energy_shrinks_images_and_their_gradient(gradient: str, factor: float) -> None:
    refinement = Refinement(steps=1, step_size=0.1, noise=0.0)
    defence = SGLDRefinement(Quadratic(), refinement, (-1.0, 1.0), gradient)
    images = torch.rand(3, *SHAPE)
    x = images.clone().requires_grad_()
    refined, labels = defence.forward(x, "handed through")
    assert labels == "handed through"
    torch.testing.assert_close(2 * refined - 1, 0.8 * (2 * images - 1))
    refined.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(images, factor))
    ones = np.ones_like(images.numpy())
    np.testing.assert_allclose(defence.estimate_gradient(images.numpy(), ones), factor * ones, rtol=1e-5)
    np.testing.assert_allclose(defence(images.numpy())[0], refined.detach().numpy(), rtol=1e-6)


@pytest.mark.parametrize("gradient", ["exact", "straight-through"])
def test_it_protects_an_art_classifier(gradient: str) -> None:
    model = jem(2)
    defence = SGLDRefinement(model, gradient=gradient)
    classifier = somebody(defence)
    images, labels = batch(model)
    defence.reseed(1)
    with untouched(model, images, everything=False):
        logits = classifier.predict(images.numpy())
        refined = model.with_refinement(chains=1).reseed(1).refine(images).squeeze(1).numpy()
        np.testing.assert_allclose(logits, somebody(None).predict(refined), rtol=1e-4, atol=1e-5)
        attack = ProjectedGradientDescent(classifier, eps=0.1, eps_step=0.05, max_iter=2, verbose=False)
        found = attack.generate(x=images.numpy(), y=labels.numpy())
    assert np.abs(found - images.numpy()).max() <= 0.1 + 1e-6
    assert not np.array_equal(found, images.numpy())


def test_it_protects_a_jem_and_clips_where_asked() -> None:
    defence = SGLDRefinement(Quadratic(), Refinement(steps=1, step_size=-0.0, noise=1.0), clip=True, seed=3)
    images = torch.full((2, *SHAPE), 0.5)
    refined = defence.forward(images)[0]
    assert float(refined.min()) == 0.0
    assert float(refined.max()) == 1.0
    assert JEMARTClassifier(jem(1), preprocessing_defences=defence).predict(images.numpy()).shape == (2, CLASSES)
    assert not defence.apply_fit
    assert defence.apply_predict


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="with_refinement"):
        SGLDRefinement(jem(1), Refinement(steps=3))
    with pytest.raises(ValueError, match="expected gradient"):
        SGLDRefinement(jem(1), gradient="none")
    with pytest.raises(TypeError, match="log p"):
        SGLDRefinement("energy")  # type: ignore[arg-type]
    assert isinstance(SGLDRefinement(Quadratic()).model, JEMClassifier)


@pytest.mark.parametrize("gradient", ["exact", "straight-through"])
def test_the_noise_is_that_of_the_models_own_stream(gradient: str) -> None:
    model = jem(2)
    defence = SGLDRefinement(model, gradient=gradient)
    images, _ = batch(model)

    def own() -> Tensor:
        return model.with_refinement(chains=1).refine(images).squeeze(1)

    def refined() -> Tensor:
        return defence.forward(images)[0]

    model.reseed(4)
    first, second = refined(), refined()
    assert not torch.equal(first, second)
    assert model._position == 2 * len(images)
    model.reseed(4)
    torch.testing.assert_close(refined(), first)
    torch.testing.assert_close(model.with_refinement(chains=1).reseed(4).refine(images).squeeze(1), first)
    model(images)  # takes noise of the same stream
    assert not torch.allclose(refined(), second)
    with model.frozen_noise(3):
        assert torch.equal(refined(), refined())
        frozen = refined()
    with model.with_refinement(chains=1).frozen_noise(3) as view:
        torch.testing.assert_close(view.refine(images).squeeze(1), frozen)
    assert not torch.equal(refined(), frozen)


@pytest.mark.parametrize("kind", ["model", "energy"])
def test_seeds_differ(kind: str) -> None:
    model = jem(2)
    images, _ = batch(model)

    def refined(seed: int) -> Tensor:
        if kind == "model":
            return SGLDRefinement(model, seed=seed).forward(images)[0]
        return SGLDRefinement(Quadratic(), Refinement(steps=1, step_size=0.1), seed=seed).forward(images)[0]

    position = model._position
    assert torch.equal(refined(1), refined(1))
    assert not torch.equal(refined(1), refined(2))
    assert model._position == position


def test_parameters_take_effect_or_are_refused() -> None:
    model = jem(2)
    defence = SGLDRefinement(model, seed=1)
    images, _ = batch(model)
    x = images.clone().requires_grad_()
    defence.set_params(gradient="straight-through", clip=True)
    gradient = torch.autograd.grad(defence.forward(x)[0].clamp(0, 1).sum(), x)[0]
    assert set(gradient.unique().tolist()) <= {0.0, 1.0}
    for wrong in ({"gradient": "nope"}, {"clip": 3}, {"steps": 3}):
        with pytest.raises(ValueError, match="expected"):
            defence.set_params(**wrong)
    assert (defence.gradient, defence.clip) == ("straight-through", True)
