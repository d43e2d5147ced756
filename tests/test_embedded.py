import json

import pytest
import torch

import jem_robust as jr
from jem_robust.checkpoints import file_hash
from jem_robust.cli import run
from jem_robust.images import ASSETS
from jem_robust.models import EMBEDDED


def accuracy(model, images, labels):
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).double().mean())


def test_embedded_images_are_small_balanced_and_carded():
    images, labels = jr.load_images("fashion-mnist")
    assert images.shape == (1000, 1, 28, 28)
    assert images.dtype == torch.float32
    assert (images.min(), images.max()) == (0, 1)
    assert labels.bincount().tolist() == [100] * 10
    for limit in (10, 64, 100):
        some, their = jr.load_images("fashion-mnist", limit=limit)
        assert torch.equal(some, images[:limit])
        assert their.bincount(minlength=10).max() - their.bincount(minlength=10).min() <= 1
    assert (ASSETS / "fashion-mnist-test.npz").stat().st_size < 500_000
    assert {"source", "licence", "command"} <= set(json.loads((ASSETS / "fashion-mnist-test.json").read_text()))


@pytest.mark.parametrize("name", list(EMBEDDED))
def test_embedded_models_are_as_their_cards_say(name):
    model = jr.load_model(name, steps=0)
    card = model.card
    needed = {"name", "description", "data", "licence", "command", "architecture", "training", "metrics", "refinement"}
    assert needed <= set(card)
    assert card["sha256"] == file_hash(EMBEDDED[name])
    images, labels = jr.load_images("fashion-mnist")
    # 1,000 of the card's 10,000 test images: three standard errors are .03
    assert accuracy(model, images, labels) == pytest.approx(card["metrics"]["test_accuracy_k0"], abs=0.03)
    assert model.input_shape == (1, 28, 28)
    assert model.num_classes == 10


def test_the_jem_is_accurate_and_refinement_costs_next_to_nothing():
    metrics = jr.load_model("jem-fashion-mnist").card["metrics"]
    assert metrics["test_accuracy_k0"] >= 0.87
    assert metrics["test_accuracy_k10"] >= metrics["test_accuracy_k0"] - 0.005
    model = jr.load_model("jem-fashion-mnist")
    assert model.refinement.steps == 10
    assert model.refinement.chains == 5
    images, labels = jr.load_images("fashion-mnist", limit=100)
    assert accuracy(model, images, labels) >= accuracy(model.with_refinement(steps=0), images, labels) - 0.03


def test_models_command_prints_the_cards(capsys):
    assert run(["models"]) == 0
    short = capsys.readouterr().out
    for name in EMBEDDED:
        assert name in short
    assert "test_accuracy_k10" in short
    assert run(["models", "--card"]) == 0
    assert "sha256" in capsys.readouterr().out


def test_the_jem_is_more_robust_than_the_baseline():
    images, labels = jr.load_images("fashion-mnist", limit=100)
    left = [
        jr.evaluate(jr.load_model(name, steps=0), images, labels, "linf", [0.06]).accuracy[0]
        for name in ("jem-fashion-mnist", "baseline-fashion-mnist")
    ]
    assert left[0] > left[1] + 0.2
