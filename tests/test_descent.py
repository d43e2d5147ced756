"""PGD from the largest eps down: known answers, fewer gradients, the same curve."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import jem_robust as jr
from jem_robust.evaluation import robustness
from jem_robust_attacks import PGD, Descent
from jem_robust_attacks.norms import distance

EPSILONS = [0.01, 0.02, 0.03, 0.04, 0.06, 0.08]


class Linear:
    """Two classes apart by w x + b; counts images asked about, each gradient twice."""

    bounds, deterministic = (0.0, 1.0), True

    def __init__(self, weight, bias):
        self.weight, self.bias, self.asked = weight, bias, 0

    def draw(self, images, image_ids, draw_ids, purpose, seed):
        self.asked += len(images) * (2 if torch.is_grad_enabled() and images.requires_grad else 1)
        value = images.flatten(1) @ self.weight + self.bias
        return torch.stack([-value, value], 1)


def world(n=30):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(16, generator=generator, dtype=torch.float64)
    x = 0.3 + 0.4 * torch.rand(n, 1, 4, 4, generator=generator, dtype=torch.float64)
    model = Linear(weight, -(x.flatten(1) @ weight).median())
    value = x.flatten(1) @ weight + model.bias
    return model, x, (value > 0).long(), value.abs()


@pytest.mark.parametrize(("norm", "dual"), [("linf", 1), ("l2", 2)])
def test_each_image_is_broken_from_its_own_margin_on(norm, dual):
    model, x, y, value = world()
    y[0] = 1 - y[0]
    sizes = [e * (1 if norm == "linf" else 4) for e in EPSILONS]
    candidates, nonfinite = Descent(PGD(norm, steps=10), sizes).search(model, x, y)
    assert candidates.shape == (30, 1, 1, 4, 4)
    assert not nonfinite.any()
    reached, margins = distance(candidates[:, 0], x, norm), value / model.weight.norm(p=dual)
    for i in range(1, 30):
        within = [e for e in sizes if e > float(margins[i])]
        if within:
            assert float(margins[i]) <= float(reached[i]) <= within[0] + 1e-9
        else:
            assert reached[i] == 0
    assert reached[0] == 0  # wrong from the start: left alone


def test_images_fail_once_whatever_the_number_of_epsilons():
    asked = []
    for sizes in (EPSILONS, np.linspace(0.001, 0.08, 60)):
        model, x, y, _ = world()
        Descent(PGD(steps=10, targets=0), sizes).search(model, x, y)
        asked.append(model.asked / len(x))
    assert asked[0] < 2 * 10 * 2.5  # alone at each eps it takes up to 2 * 10 * 6
    assert asked[1] < 1.8 * asked[0]


@dataclass(frozen=True)
class Given(PGD):
    """Finds the candidates (M, 1, 4, 4) it was given, as offsets."""

    offsets: torch.Tensor | None = None

    def search(self, model, images, *rest):
        assert self.offsets is not None
        return images.unsqueeze(1) + self.offsets, torch.zeros(len(images), dtype=torch.bool)


def test_a_later_candidate_does_not_displace_a_nearer_one():
    model = Linear(torch.eye(16, dtype=torch.float64)[0], torch.tensor(-0.5, dtype=torch.float64))
    x = torch.full((1, 1, 4, 4), 0.499, dtype=torch.float64)
    near, far = torch.zeros_like(x), torch.zeros_like(x)
    near[..., 0, 0], far[..., 0, 0], far[..., 1, 1] = 0.08, 0.002, 0.08  # drawn in: .0025, and .04 on the other axis
    offsets = torch.cat([near, far])
    candidates, _ = Descent(Given(offsets=offsets), [0.01, 0.08]).search(model, x, [0])
    assert 0.001 < float(distance(candidates[:, 0], x, "linf")) <= 0.0025 + 1e-9


def test_same_curve_as_one_attack_after_another(monkeypatch):
    model = jr.load_model("jem-fashion-mnist", steps=0)
    images, labels = jr.load_images("fashion-mnist", limit=40)
    curves, spent = [], []
    for lowered in (True, False):
        if not lowered:
            monkeypatch.setattr(robustness, "descending", lambda members, epsilons: members)
        before = model.spent.backwards
        curves.append(jr.evaluate(model, images, labels, "linf", EPSILONS, attacks=[PGD(steps=10)]))
        spent.append(model.spent.backwards - before)
    assert np.abs(curves[0].raw - curves[1].raw).max() <= 1 / 40 + 1e-9
    assert spent[0] * 3 < spent[1] * 2  # at 10 iterations targeted runs are whole ones
    assert (curves[0].distances <= np.array(EPSILONS)[:, None] + 1e-6).all()
    assert curves[0].about["attacks"] == curves[1].about["attacks"]


def test_random_models_and_single_epsilons_are_attacked_as_they_were():
    x = torch.rand(2, 1, 28, 28)
    for steps, epsilons in ((1, EPSILONS), (0, [0.1])):
        model = jr.load_model("jem-fashion-mnist", steps=steps)
        members = robustness.descending(robustness.resolve(["pgd"], model, x, "linf", None), epsilons)
        assert isinstance(members[0].attack, PGD)


def test_a_model_that_fails_on_what_was_found_counts_as_fooled():
    model, x, y, _ = world(6)

    def draw(images, *rest):
        logits = Linear.draw(model, images, *rest)
        changed = (images - images.detach().mean()).abs().amax((1, 2, 3)) > 0.21
        return torch.where(changed.unsqueeze(1), torch.nan, logits)

    class Failing(Linear):
        def draw(self, images, *rest):
            return draw(images, *rest)

    candidates, nonfinite = Descent(PGD(steps=5), [0.05, 0.3]).search(Failing(model.weight, model.bias), x, y)
    assert torch.isfinite(candidates).all()
    assert nonfinite.any()
