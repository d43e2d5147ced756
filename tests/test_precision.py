"""bf16 for attack gradients: about the same gradient, verdicts untouched."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from jem_robust import JEMClassifier, Refinement, evaluate, load_images, load_model
from jem_robust.precision import has_bf16
from jem_robust_attacks import PGD
from tests.small_training import QUICK, trainer


@pytest.mark.parametrize("memory", [0, 2**30])
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("gradient", ["exact", "straight-through"])
def test_gradients_agree_and_forwards_are_exact(steps, gradient, memory):
    model = load_model("jem-fashion-mnist", steps=steps, gradient=gradient)
    model.memory = memory
    narrow = model.with_precision("bf16")
    assert narrow.with_refinement(steps=1).precision == "bf16"
    assert narrow.memory == memory
    images, _ = load_images("fashion-mnist", limit=4)
    ids = torch.arange(4)
    gradients = []
    for view in (model, narrow):
        with torch.no_grad():
            quiet = view.draw(images, ids, ids, "attack", 0)
        assert torch.equal(quiet, model.draw(images, ids, ids, "attack", 0))
        leaf = images.clone().requires_grad_()
        logits = view.draw(leaf, ids, ids, "attack", 0)
        assert logits.dtype == torch.float32
        gradients.append(torch.autograd.grad(logits.logsumexp(1).sum(), leaf)[0])
    assert gradients[1].dtype == torch.float32
    assert not torch.equal(*gradients)
    assert bool((F.cosine_similarity(gradients[0].flatten(1), gradients[1].flatten(1)) > 0.97).all())


@pytest.mark.filterwarnings("ignore:this processor only imitates bfloat16")
def test_evaluation_judges_in_full_precision():
    model = load_model("jem-fashion-mnist", steps=0)
    images, labels = load_images("fashion-mnist", limit=20)
    curves = [
        evaluate(model, images, labels, epsilons=[0, 16 / 255], attacks=[PGD(steps=5)], precision=precision)
        for precision in ("float32", "bf16")
    ]
    assert curves[0].clean == curves[1].clean
    assert curves[1].about["precision"] == "bf16"
    found = torch.from_numpy(curves[1].adversarials[-1])
    assert (model(found).argmax(1) == labels).double().mean() == curves[1].raw[-1]
    assert abs(curves[0].raw[-1] - curves[1].raw[-1]) <= 0.05


def test_unknown_precisions_and_other_models_are_refused():
    with pytest.raises(ValueError, match="precision"):
        JEMClassifier(torch.nn.Flatten(), Refinement(), precision="int8")
    with pytest.raises(ValueError, match="JEMClassifier"):
        evaluate(lambda x: x.flatten(1), torch.rand(2, 1, 2, 2), [0, 1], precision="bf16")


@pytest.mark.parametrize(("units", "expected"), [({"avx2": True, "avx512_bf16": False}, False), ({"bf16": True}, True)])
def test_where_bfloat16_is_only_imitated_users_are_told_and_training_does_without(
    units, expected, monkeypatch, tmp_path, recwarn
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: units, raising=False)
    assert has_bf16("cpu") is expected
    model, images = load_model("jem-fashion-mnist", steps=0), torch.rand(1, 1, 28, 28)
    evaluate(model, images, [0], epsilons=[0.01], attacks=[PGD(steps=1)], precision="bf16")
    assert ["use float32" in str(w.message) for w in recwarn] == ([] if expected else [True])
    run = trainer(tmp_path, replace(QUICK, precision="auto"))
    assert run.settings.precision == ("bf16" if expected else "float32")


def test_where_nobody_can_tell_bfloat16_is_taken_to_be_there(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert has_bf16("cpu")
    assert has_bf16("meta")
