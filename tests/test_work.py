"""Forwards and backwards of fixed small runs: a change that makes them grow has to say why, and raise the figure here.

Rows of images x chains x draws, counted by `model.spent`. Attacks stop by what floats say, which may differ a little
from processor to processor: their figures are 3 % above what was counted.
"""

from copy import copy

import pytest
import torch

import jem_robust as jr
from jem_robust.gradients import Spent
from jem_robust_attacks import PGD, BoundaryAttack, PointwiseAttack, RayS, Square

IMAGES = 8


def spent(model, run):
    before = copy(model.spent)
    run()
    work = model.spent.since(before)
    return work.forwards, work.backwards


def jem(steps, memory=2**30):
    model = jr.load_model("jem-fashion-mnist", steps=steps, memory=memory)
    return model.with_refinement(chains=1) if steps else model


@pytest.mark.parametrize(
    ("memory", "work"),
    [(2**30, (11, 31)), (0, (21, 41))],  # a step: 2F, and 2F for its Hessian product; 2F more where it is recomputed
)
def test_a_gradient(memory, work):
    model, (images, _) = jem(10, memory), jr.load_images("fashion-mnist", limit=IMAGES)
    ids = torch.arange(IMAGES)
    model(images)  # what graphs take is measured once

    def gradient():
        leaf = images.clone().requires_grad_()
        torch.autograd.grad(model.draw(leaf, ids, ids, "attack", 0).sum(), leaf)

    forwards, backwards = spent(model, gradient)
    assert (forwards / IMAGES, backwards / IMAGES) == work


@pytest.mark.parametrize(
    ("steps", "attack", "most"),
    [
        (0, PGD(steps=10), (295, 201)),
        (0, PGD(steps=10, restarts=2), (347, 252)),
        (2, PGD(steps=4, eot=1), (1334, 1240)),
        (2, PGD(steps=2), (1421, 1442)),
        (0, Square(max_queries=60), (1047, 8)),
        (0, BoundaryAttack("linf", max_queries=60), (462, 8)),
        (0, RayS(max_queries=60), (475, 8)),
        (2, RayS(max_queries=60), (1632, 1129)),
    ],
    ids=str,
)
def test_an_evaluation(steps, attack, most):
    model, (images, labels) = jem(steps), jr.load_images("fashion-mnist", limit=IMAGES)
    epsilons = [0.02, 0.04, 0.06]
    forwards, backwards = spent(
        model, lambda: jr.evaluate(model, images, labels, "linf", epsilons, [attack], draws=4, select_draws=4)
    )
    assert forwards <= most[0], (forwards, backwards)
    assert backwards <= most[1], (forwards, backwards)


def test_a_pointwise_attack_stops_when_nothing_is_left_to_reset():
    model, (images, labels) = jem(0), jr.load_images("fashion-mnist", limit=IMAGES)
    forwards, backwards = spent(model, lambda: PointwiseAttack(max_queries=250)(model, images, labels))
    assert forwards <= 250 * IMAGES
    assert backwards == 0


def test_nothing_is_spent_before_anything_is_asked():
    assert jem(10).spent == Spent(0, 0)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_classification_beyond_the_memory_budget_is_recomputed(steps):
    x = torch.rand(65, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    gradients, works = [], []
    for memory in (2**30, 2**22):
        model = jem(steps, memory)
        ids = torch.arange(65)
        model.draw(x[:1], ids[:1], ids[:1], "attack", 0)
        leaf = x.clone().requires_grad_()

        def gradient(model=model, leaf=leaf, ids=ids):
            gradients.append(torch.autograd.grad(model.draw(leaf, ids, ids, "attack", 0).sum(), leaf)[0])

        works.append(spent(model, gradient))
        assert not any(p.requires_grad is False for p in model.network.parameters())
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)
    kept, recomputed = works
    assert recomputed[0] - kept[0] == 65 * (1 + steps)  # one forward more an image for it, and one a step
    assert recomputed[1] - kept[1] == 65 * steps
