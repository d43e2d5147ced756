"""JEMARTClassifier: what ART's estimator promises, on a random model, leaving it as it was."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from jem_robust import JEMClassifier, Refinement
from tests.adapters.world import CLASSES, SHAPE, TinyNet, batch, jem, untouched

pytest.importorskip("art", reason="pip install jem-robust[art]")

from jem_robust.adapters.art import JEMARTClassifier


def reference(model: JEMClassifier, images: Tensor, scalar: Any, draws: int) -> Tensor:
    """Mean over draws of the gradient of a scalar of the logits, from the model itself."""
    total = torch.zeros_like(images)
    for _ in range(draws):
        x = images.clone().requires_grad_()
        total += torch.autograd.grad(scalar(model(x)), x)[0]
    return total / draws


@pytest.mark.parametrize("steps", [0, 1, 10])
def test_predict_takes_every_form_of_images(steps: int) -> None:
    model = jem(steps)
    classifier = JEMARTClassifier(model)
    images, _ = batch(model)
    expected = model.reseed(0)(images)
    for x in (images.numpy(), images.double().numpy(), images, images.clone().requires_grad_()):
        model.reseed(0)
        with untouched(model, images, everything=False):
            logits = classifier.predict(x, batch_size=3)
        assert logits.dtype == np.float32
        torch.testing.assert_close(torch.from_numpy(logits), expected.detach())
    assert classifier.predict(images[:0].numpy()).shape == (0, CLASSES)
    with torch.inference_mode():
        assert classifier.predict(images[:1].numpy()).shape == (1, CLASSES)


def test_the_model_is_held_and_followed() -> None:
    model = jem(1)
    classifier = JEMARTClassifier(model)
    assert classifier.model is model
    assert classifier.input_shape == SHAPE
    assert classifier.nb_classes == CLASSES
    assert classifier.device == model.device
    images, _ = batch(model)
    before = classifier.predict(images.numpy())
    with torch.no_grad():
        model.network.head.weight.add_(1)
    assert not np.allclose(before, classifier.predict(images.numpy()))


@pytest.mark.parametrize("form", ["int64", "int32", "uint8", "list", "column", "one-hot", "tensor", "float one-hot"])
def test_labels_in_every_form(form: str) -> None:
    model = jem(1)
    images, labels = batch(model)
    y = labels.numpy()
    hot = np.eye(CLASSES)[y]
    given = {
        "int64": y, "int32": y.astype(np.int32), "uint8": y.astype(np.uint8), "list": y.tolist(), "column": y[:, None],
        "one-hot": hot.astype(int), "tensor": labels, "float one-hot": hot.astype(np.float32),
    }[form]  # fmt: skip
    classifier = JEMARTClassifier(model)
    model.reseed(3)
    expected = reference(model, images, lambda z: nn.functional.cross_entropy(z, labels), 1)
    model.reseed(3)
    with untouched(model, images, everything=False):
        gradient = classifier.loss_gradient(images.numpy(), given)
    assert gradient.dtype == np.float32
    torch.testing.assert_close(torch.from_numpy(gradient), expected)
    model.reseed(3)
    assert torch.equal(classifier.loss_gradient(images, given), torch.from_numpy(gradient))
    assert classifier.compute_loss(images.numpy(), given).shape == (len(images),)


def test_eot_averages_gradients_over_draws() -> None:
    model = jem(2)
    images, labels = batch(model)
    classifier = JEMARTClassifier(model, eot=3)
    model.reseed(1)
    expected = reference(model, images, lambda z: nn.functional.cross_entropy(z, labels), 3)
    model.reseed(1)
    torch.testing.assert_close(torch.from_numpy(classifier.loss_gradient(images.numpy(), labels.numpy())), expected)
    with pytest.raises(ValueError, match="eot"):
        JEMARTClassifier(model, eot=0)


def test_class_gradients() -> None:
    model = jem(1)
    images, labels = batch(model)
    classifier = JEMARTClassifier(model)
    x = images.numpy()
    with model.frozen_noise(2), untouched(model, images, everything=False):
        every = classifier.class_gradient(x)
        one = classifier.class_gradient(x, 2)
        each = classifier.class_gradient(x, labels.tolist())
        expected = reference(model, images, lambda z: z[:, 2].sum(), 1)
    assert every.shape == (len(x), CLASSES, *SHAPE)
    assert one.shape == each.shape == (len(x), 1, *SHAPE)
    np.testing.assert_allclose(every[:, 2], one[:, 0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(every[np.arange(len(x)), labels.numpy()], each[:, 0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(torch.from_numpy(one[:, 0]), expected)
    with pytest.raises(ValueError, match="expected labels from 0 to 3"):
        classifier.class_gradient(x, CLASSES)


def test_losses_of_tensors_keep_their_graph() -> None:
    model = jem(1)
    images, labels = batch(model)
    classifier = JEMARTClassifier(model)
    x = images.clone().requires_grad_()
    loss = classifier.compute_loss(x, labels, reduction="mean")
    loss.backward()
    assert x.grad is not None
    assert classifier.loss.reduction == "mean"
    assert classifier.compute_loss(images.numpy(), labels, reduction="sum").shape == ()


def test_gradients_of_confident_predictions_keep_the_labels_part() -> None:
    model = jem(0)
    with torch.no_grad():
        model.network.head.weight.mul_(150)
    images, labels = batch(model, 3)
    top = model(images).topk(2).values
    assert 18 < float((top[:, 0] - top[:, 1]).max()) < 35, "else this tests nothing"
    gradient = torch.from_numpy(JEMARTClassifier(model).loss_gradient(images.numpy(), labels.numpy()))
    model.network.double()
    exact = reference(model, images.double(), lambda z: nn.functional.cross_entropy(z, labels), 1)
    directions = (nn.functional.normalize(g.double().flatten(1), eps=1e-30) for g in (gradient, exact))
    assert float(torch.stack(list(directions)).prod(0).sum(1).min()) > 0.999


def test_activations_are_means_over_chains() -> None:
    model = jem(1)
    images, _ = batch(model)
    classifier = JEMARTClassifier(model)
    assert classifier.layer_names == ["conv", "norm", "head"]
    with model.frozen_noise(4), untouched(model, images, everything=False):
        logits = classifier.predict(images.numpy())
        np.testing.assert_allclose(classifier.get_activations(images.numpy(), "head"), logits, rtol=1e-4, atol=1e-5)
        assert classifier.get_activations(images.numpy(), 0, batch_size=3).shape == (len(images), 4, 4, 4)
    assert not model.network.head._forward_hooks
    x = images.clone().requires_grad_()
    classifier.get_activations(x, "conv", framework=True).sum().backward()
    assert x.grad is not None
    with pytest.raises(ValueError, match="expected a layer out of"):
        classifier.get_activations(images.numpy(), "nowhere")


def test_fit_trains_the_network_and_nothing_else() -> None:
    model = jem(1)
    images, labels = batch(model, 40)
    weights = copy.deepcopy(model.network.head.weight)
    flags, grads = [m.training for m in model.modules()], [p.grad for p in model.parameters()]
    model.network.head.bias.requires_grad_(True)
    outside = torch.get_rng_state()
    JEMARTClassifier(model).fit(images.numpy(), np.eye(CLASSES)[labels.numpy()], batch_size=8, nb_epochs=1)
    assert not torch.equal(model.network.head.weight, weights)
    assert [m.training for m in model.modules()] == flags
    for parameter, gradient in zip(model.parameters(), grads, strict=True):
        assert parameter.grad is gradient
        assert gradient is not None
        assert bool((gradient == 0.5).all())
    assert torch.equal(torch.get_rng_state(), outside)


@pytest.mark.parametrize("steps", [0, 1, 10])
def test_defences_before_and_after_the_model(steps: int) -> None:
    from art.defences.postprocessor import ReverseSigmoid
    from art.defences.preprocessor import FeatureSqueezing, GaussianAugmentation

    model = jem(steps)
    images, labels = batch(model)
    squeezed = JEMARTClassifier(model, preprocessing_defences=FeatureSqueezing((0, 1), bit_depth=3))
    gradient = squeezed.loss_gradient(images.numpy(), labels.numpy())
    assert gradient.shape == images.shape
    assert squeezed.class_gradient(images.numpy()).shape == (len(images), CLASSES, *SHAPE)
    noisy = GaussianAugmentation(apply_predict=False)
    both = JEMARTClassifier(model, postprocessing_defences=ReverseSigmoid(), preprocessing_defences=noisy)
    assert both.predict(images.numpy()).shape == (len(images), CLASSES)
    scaled = JEMARTClassifier(model, clip_values=(0, 255), preprocessing=(0.0, 255.0))
    with model.frozen_noise(1):
        np.testing.assert_allclose(
            scaled.predict(255 * images.numpy()), JEMARTClassifier(model).predict(images.numpy()), atol=1e-4
        )


def test_pickled_and_cloned() -> None:
    model = jem(0)
    images, _ = batch(model)
    classifier = JEMARTClassifier(model)
    again = pickle.loads(pickle.dumps(classifier))  # noqa: S301  # ours
    np.testing.assert_array_equal(again.predict(images.numpy()), classifier.predict(images.numpy()))
    clone = classifier.clone_for_refitting()
    assert clone.model is not model
    assert not np.allclose(clone.predict(images.numpy()), classifier.predict(images.numpy()))


def test_what_does_not_fit_is_refused() -> None:
    bare = JEMClassifier(TinyNet(), Refinement(steps=0))
    with pytest.raises(ValueError, match="expected input_shape"):
        JEMARTClassifier(bare)
    assert JEMARTClassifier(bare, input_shape=SHAPE).nb_classes == CLASSES
    with pytest.raises(TypeError, match="expected a JEMClassifier, got TinyNet"):
        JEMARTClassifier(TinyNet(), input_shape=SHAPE)
    with pytest.raises(ValueError, match="channels_first"):
        JEMARTClassifier(bare, input_shape=SHAPE, channels_first=False)
    classifier = JEMARTClassifier(jem(1))
    with pytest.raises(ValueError, match=r"expected images in \[0, 1\]"):
        classifier.predict(np.full((1, *SHAPE), 2, np.float32))
    with pytest.raises(TypeError, match="divide by 255"):
        classifier.predict(np.zeros((1, *SHAPE), np.uint8))
