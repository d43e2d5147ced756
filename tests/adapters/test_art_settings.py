"""JEMARTClassifier's settings: read, set, copied, saved; and those that make no sense."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from jem_robust import JEMClassifier, Refinement
from tests.adapters.world import CLASSES, SHAPE, TinyNet, batch, jem

pytest.importorskip("art", reason="pip install jem-robust[art]")

from art.defences.postprocessor import ReverseSigmoid
from art.defences.preprocessor import FeatureSqueezing

from jem_robust.adapters.art import JEMARTClassifier


def defended(model: JEMClassifier) -> JEMARTClassifier:
    """One with everything that can be set."""
    return JEMARTClassifier(
        model, nn.CrossEntropyLoss(label_smoothing=0.1), eot=2, clip_values=(0, 255), preprocessing=(0.0, 255.0),
        preprocessing_defences=FeatureSqueezing((0, 255), bit_depth=2), postprocessing_defences=ReverseSigmoid(),
    )  # fmt: skip


def test_parameters_read_and_set_again_change_nothing() -> None:
    model = jem(0)
    images, labels = batch(model)
    x = 255 * images.numpy()
    classifier = defended(model)
    before = classifier.predict(x), classifier.loss_gradient(x, labels)
    classifier.set_params(**classifier.get_params())
    assert classifier.model is model
    np.testing.assert_array_equal(classifier.predict(x), before[0])
    np.testing.assert_array_equal(classifier.loss_gradient(x, labels), before[1])
    assert classifier.get_params()["eot"] == 2


def test_parameters_that_are_set_take_effect() -> None:
    model, other = jem(0), jem(0, aggregate="probabilities")
    images, labels = batch(model)
    classifier = JEMARTClassifier(model)
    classifier.set_params(model=other, eot=3, loss=nn.MultiMarginLoss())
    assert classifier.model is other
    assert classifier.eot == 3
    expected = JEMARTClassifier(other, nn.MultiMarginLoss())
    np.testing.assert_allclose(
        classifier.loss_gradient(images, labels), expected.loss_gradient(images, labels), rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nb_classes": 3}, "expected nb_classes=4"),
        ({"input_shape": (1, 9, 9)}, "expected input_shape"),
        ({"clip_values": (0, 255)}, "clip_values"),
        ({"clip_values": None}, "clip_values"),
        ({"clip_values": (-1, 1)}, "clip_values"),
        ({"clip_values": 1}, "clip_values"),
        ({"preprocessing": (0.5, 0.5)}, "clip_values"),
        ({"eot": 0}, "eot"),
        ({"channels_first": False}, "channels_first"),
    ],
)
@pytest.mark.parametrize("knows", [True, False])
def test_settings_against_the_model_are_refused(change: dict[str, Any], message: str, knows: bool) -> None:
    model = jem(1) if knows else JEMClassifier(TinyNet(), Refinement(steps=0))
    shape = {"input_shape": SHAPE}
    with pytest.raises(ValueError, match=message):
        JEMARTClassifier(model, **{**shape, **change})
    classifier = JEMARTClassifier(model, **shape)
    before = classifier.get_params()
    with pytest.raises(ValueError, match=message):
        classifier.set_params(**change)
    after = classifier.get_params()
    assert all(np.array_equal(after[name], before[name]) for name in before)


def test_clip_values_with_a_mean_and_a_divisor_a_channel() -> None:
    model = JEMClassifier(nn.Sequential(nn.Flatten(), nn.Linear(48, CLASSES)), Refinement(steps=0))
    zeros, widths = np.zeros(3, np.float32), np.full(3, 255, np.float32)
    classifier = JEMARTClassifier(model, input_shape=(3, 4, 4), clip_values=(0, 255), preprocessing=(zeros, widths))
    classifier.set_params(**classifier.get_params())
    x = torch.rand(2, 3, 4, 4)
    np.testing.assert_allclose(classifier.predict(255 * x.numpy()), model(x).detach().numpy(), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="clip_values"):
        JEMARTClassifier(model, input_shape=(3, 4, 4), preprocessing=(zeros + 1, widths))


def test_unknown_parameters_and_models_are_refused() -> None:
    classifier = JEMARTClassifier(jem(1))
    with pytest.raises(ValueError, match="expected parameters out of"):
        classifier.set_params(epochs=3)
    with pytest.raises(TypeError, match="expected a JEMClassifier"):
        classifier.set_params(model=TinyNet())


def test_a_clone_keeps_everything_but_the_weights() -> None:
    model = jem(0)
    images, _ = batch(model)
    classifier = defended(model)
    clone = classifier.clone_for_refitting()
    own, copied = classifier.get_params(), clone.get_params()
    for name in ("eot", "preprocessing_defences", "postprocessing_defences", "preprocessing", "nb_classes"):
        assert copied[name] == own[name], name
    np.testing.assert_array_equal(clone.clip_values, classifier.clip_values)
    assert clone.loss.label_smoothing == 0.1
    assert clone.model is not model
    clone.model.network.load_state_dict(model.network.state_dict())
    np.testing.assert_array_equal(clone.predict(255 * images.numpy()), classifier.predict(255 * images.numpy()))


def test_saved_weights_load_into_the_model(tmp_path: Path) -> None:
    model = jem(1)
    JEMARTClassifier(model).save("weights", path=str(tmp_path))
    state = torch.load(tmp_path / "weights.model", weights_only=True)
    other = jem(1)
    with torch.no_grad():
        other.network.head.weight.zero_()
    other.load_state_dict(state)
    assert torch.equal(other.network.head.weight, model.network.head.weight)


class Scaled(nn.Module):
    """A loss of somebody's own, in whatever type its scale has."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.reduction = "mean"
        self.register_buffer("scale", torch.arange(1.0, 1 + CLASSES, dtype=dtype))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = -(logits @ self.scale).sum()
        return loss


WEIGHT = torch.tensor([1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=WEIGHT), nn.CrossEntropyLoss(weight=WEIGHT.double()),
        nn.MultiMarginLoss(weight=WEIGHT), Scaled(torch.float32), Scaled(torch.float64),
    ],
    ids=str,
)  # fmt: skip
def test_losses_with_tensors_of_their_own(loss: Any) -> None:
    model = jem(0)
    images, labels = batch(model)
    classifier = JEMARTClassifier(model, loss)
    x = images.double().requires_grad_()
    wide = jem(0)
    wide.network.double()
    targets = labels if not isinstance(loss, Scaled) else nn.functional.one_hot(labels)
    before = {name: tensor.dtype for name, tensor in loss.named_buffers()}
    gradient = classifier.loss_gradient(images.numpy(), labels.numpy())
    value = classifier.compute_loss(images.numpy(), labels.numpy(), reduction="mean")
    assert {name: tensor.dtype for name, tensor in loss.named_buffers()} == before
    assert loss.reduction == "mean"
    expected = loss.double()(wide(x), targets)
    torch.testing.assert_close(value, np.asarray(expected.item(), np.float32), rtol=1e-4, atol=1e-5)
    exact = torch.autograd.grad(expected, x)[0].float()
    torch.testing.assert_close(torch.from_numpy(gradient), exact, rtol=1e-3, atol=1e-5)
