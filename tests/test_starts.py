"""Where decision attacks start: points given, images of other classes, noise; each image goes its own way."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from jem_robust_attacks import BoundaryAttack, PointwiseAttack, RayS
from tests.test_decision_contract import CONTRACT, Linear, every_attack, images, labels_of

minimising = pytest.mark.parametrize("attack", [attack for attack, eps in CONTRACT.values() if eps is None], ids=repr)


class Near:
    """Class 1 within `radius` (l2) of given pictures (S, C, H, W), class 0 elsewhere."""

    bounds, deterministic = (0.0, 1.0), True

    def __init__(self, pictures: Tensor, radius: float) -> None:
        self.pictures, self.radius = pictures, radius

    def draw(self, x: Tensor, *_: Any) -> Tensor:
        near = torch.cdist(x.flatten(1), self.pictures.flatten(1)).amin(1) < self.radius
        return torch.stack([(~near).double(), near.double()], 1)


@minimising
def test_starts_are_used_and_useless_ones_do_no_harm(attack: Any) -> None:
    x = images()
    far = (x - 0.6 * torch.sign(Linear().gap(x)).view(-1, 1, 1, 1) * torch.sign(Linear().weight)).clamp(0, 1)
    good = attack(Linear(), x, labels_of(x), starts=far)
    several = attack(Linear(), x, labels_of(x), starts=torch.stack([x, far], 1))
    useless = attack(Linear(), x, labels_of(x), starts=x)
    assert good.success.all()
    assert several.success.all()
    assert torch.equal(useless.success, attack(Linear(), x, labels_of(x)).success)
    with pytest.raises(ValueError, match="expected starts"):
        attack(Linear(), x, labels_of(x), starts=x[:2])
    with pytest.raises(ValueError, match="finite starts"):
        attack(Linear(), x, labels_of(x), starts=x * torch.nan)


@pytest.mark.parametrize("attack", [BoundaryAttack(max_queries=400), PointwiseAttack(max_queries=400)], ids=repr)
def test_without_the_given_start_nothing_would_be_found(attack: Any) -> None:
    x = images(2)
    start = torch.rand(x.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    model = Near(start, 0.7)
    assert not attack(model, x, [0, 0]).success.any()
    assert attack(model, x, [0, 0], starts=start).success.all()


@pytest.mark.parametrize("attack", [BoundaryAttack(max_queries=400), PointwiseAttack(max_queries=400)], ids=repr)
def test_images_of_other_classes_serve_where_noise_does_not(attack: Any) -> None:
    x = images(4)
    gap = float(torch.cdist(x[:2].flatten(1), x[2:].flatten(1)).min())
    assert attack(Near(x[2:], gap / 2), x, [0, 0, 1, 1]).success[:2].all()


@every_attack
def test_own_stop(attack: Any, eps: float | None) -> None:
    """Images wrong already or that cannot be fooled neither hold up nor shorten what the others get."""

    class Counting(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.draws: Counter[int] = Counter()

        def draw(self, x: Tensor, ids: Tensor, *rest: Any) -> Tensor:
            self.draws.update(ids.tolist())
            logits = super().draw(x, ids, *rest)
            hopeless = torch.nn.functional.one_hot(labels[ids], 2).to(logits)
            return torch.where((ids == 1)[:, None], hopeless, logits)

    x, model = images(), Counting()
    labels = labels_of(x)
    labels[0] = 1 - labels[0]
    result = attack(model, x, labels, eps)
    assert result.queries.tolist() == [model.draws[i] for i in range(len(x))]
    assert result.queries[0] == 1
    assert result.distances[0] == 0
    assert result.distances[1] == torch.inf
    alone = attack(Counting(), x[2:], labels[2:], eps, image_ids=torch.arange(2, len(x)))
    for name in ("adversarials", "distances", "success", "queries"):
        assert torch.equal(getattr(result, name)[2:], getattr(alone, name)), name


@every_attack
@pytest.mark.parametrize("most", [7, 90, 300])
def test_a_random_models_budget_counted_from_outside(attack: Any, eps: float | None, most: int) -> None:
    """Confirmations included."""
    draws: Counter[int] = Counter()

    class Counting(Linear):
        def draw(self, x: Tensor, ids: Tensor, *rest: Any) -> Tensor:
            draws.update(ids.tolist())
            return super().draw(x, ids, *rest)

    x = images()
    limited = type(attack)(**{**vars(attack), "max_queries": most})
    result = limited(Counting(0.2), x, labels_of(x), eps)
    assert result.queries.tolist() == [draws[i] for i in range(len(x))]
    assert max(draws.values()) <= most


@minimising
def test_one_lucky_draw_does_not_count(attack: Any) -> None:
    """Seven draws in ten are fooled everywhere but at the image itself: not often enough for the default rate."""

    class Often(Linear):
        def draw(self, x: Tensor, ids: Tensor, draws: Tensor, *_: Any) -> Tensor:
            keys = torch.stack([ids, draws], 1).tolist()
            lucky = torch.tensor([np.random.default_rng(key).random() < 0.7 for key in keys], dtype=torch.bool)
            lucky &= (x - clean[ids]).abs().flatten(1).amax(1) > 0
            return torch.stack([~lucky, lucky], 1).double()

    clean = images(6)
    result = attack(Often(1.0), clean, [0] * 6)
    assert not result.success.any()
    lenient = type(attack)(**{**vars(attack), "fooling_rate": 0.5})
    assert lenient(Often(1.0), clean, [0] * 6).success.any()


def test_the_closest_of_several_starts_wins() -> None:
    """RayS looks along each given direction."""
    x, model = images(1), Linear()
    best = torch.sign(model.weight) * -torch.sign(model.gap(x))
    result = RayS(max_queries=60)(model, x, labels_of(x), starts=(x + 0.3 * best).clamp(0, 1))
    margin = model.gap(x).abs() / model.weight.abs().sum()
    assert result.distances.item() <= 1.1 * margin.item()
