"""JEMARTClassifier.fit: as ART's users and ART's own trainers call it."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from tests.adapters.world import CLASSES, SHAPE, batch, jem, untouched

pytest.importorskip("art", reason="pip install jem-robust[art]")

from art.attacks.evasion import FastGradientMethod
from art.defences.trainer import AdversarialTrainer

from jem_robust.adapters.art import JEMARTClassifier


def data(count: int) -> tuple[Any, Any]:
    images, labels = batch(jem(0), count)
    return images.numpy(), labels.numpy()


@pytest.mark.parametrize(("count", "batch_size"), [(40, 20), (16, 8), (9, 4)])
def test_adversarial_training(count: int, batch_size: int) -> None:
    classifier = JEMARTClassifier(jem(1))
    before = copy.deepcopy(classifier.model.network.head.weight)
    x, y = data(count)
    trainer = AdversarialTrainer(classifier, FastGradientMethod(classifier, eps=0.1), ratio=0.5)
    trainer.fit(x, np.eye(CLASSES, dtype=np.float32)[y], batch_size=batch_size, nb_epochs=1)
    assert not torch.equal(before, classifier.model.network.head.weight)


@pytest.mark.parametrize("count", [1, 2, 5, 30])
def test_few_images_and_the_default_batch_size(count: int) -> None:
    classifier = JEMARTClassifier(jem(1))
    before = copy.deepcopy(classifier.model.network.head.weight)
    x, y = data(count)
    classifier.fit(x, y, nb_epochs=1)
    assert not torch.equal(before, classifier.model.network.head.weight)


def test_images_of_one_class_alone() -> None:
    x, y = data(12)
    JEMARTClassifier(jem(1)).fit(x, np.full_like(y, CLASSES - 1), batch_size=4, nb_epochs=1)


def test_learning_lowers_the_loss() -> None:
    classifier = JEMARTClassifier(jem(0))
    x, _ = data(24)
    y = np.arange(24) % CLASSES
    x = (x + y[:, None, None, None]) / CLASSES  # the darkest class is 0
    before = classifier.compute_loss(x, y).mean()
    classifier.fit(x, y, batch_size=24, nb_epochs=100)
    assert classifier.compute_loss(x, y).mean() < before - 0.02


def test_no_epochs_change_nothing() -> None:
    model = jem(1)
    x, y = data(40)
    with untouched(model, x, y):
        JEMARTClassifier(model).fit(x, y, batch_size=8, nb_epochs=0)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"bogus_kwarg": 3}, TypeError, r"got \['bogus_kwarg'\]"),
        ({"scheduler": object()}, TypeError, "scheduler"),
        ({"nb_epochs": -1}, ValueError, "nb_epochs"),
        ({"nb_epochs": 1.5}, ValueError, "nb_epochs"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"settings": 3}, TypeError, "TrainingSettings"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], error: type, message: str) -> None:
    model = jem(1)
    x, y = data(20)
    with untouched(model, x, y), pytest.raises(error, match=message):
        JEMARTClassifier(model).fit(x, y, **settings)
    with pytest.raises(ValueError, match="expected at least 1 image"):
        JEMARTClassifier(model).fit(np.zeros((0, *SHAPE), np.float32), np.zeros(0, int))
