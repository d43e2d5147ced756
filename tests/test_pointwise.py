"""Pointwise attack on linear models: few pixels from few queries, each as close as can be; pixels and channels."""

import pytest
import torch
from torch import Tensor

from jem_robust_attacks import PointwiseAttack
from jem_robust_attacks.norms import distance
from tests.test_decision_contract import Linear, images, labels_of

COLOUR = (3, 6, 6)


def fewest(model: Linear, x: Tensor) -> Tensor:
    """Pixels moved to the bounds that help, the most helpful first, until the sign turns: (N,)."""
    gap = model.gap(x)
    against = -torch.sign(gap)[:, None, None, None] * model.weight
    gains = torch.where(against > 0, 1 - x, -x) * against
    return (gains.sum(1).flatten(1).sort(1, descending=True).values.cumsum(1) < gap.abs()[:, None]).sum(1) + 1


@pytest.mark.parametrize(("queries", "times"), [(200, 2.0), (800, 1.5)])
def test_few_pixels_from_fewer_queries_than_one_pixel_at_a_time(queries: int, times: float) -> None:
    """900 pixels: a single pass over them one by one would cost 900 queries."""
    shape = (1, 30, 30)
    x, model = images(8, shape), Linear(shape=shape)
    result = PointwiseAttack(max_queries=queries)(model, x, labels_of(x))
    assert result.success.all()
    assert (result.distances / fewest(model, x)).median() <= times


@pytest.mark.parametrize("granularity", ["pixel", "channel"])
def test_granularity(granularity: str) -> None:
    """One of three channels matters: "channel" leaves the others alone, and l0 counts pixels either way."""
    x, model = images(6, COLOUR), Linear(shape=COLOUR)
    model.weight[1:] = 0
    labels = model(x).argmax(1)
    result = PointwiseAttack(granularity=granularity, max_queries=500)(model, x, labels)
    assert result.success.all()
    changed = result.adversarials != x
    assert torch.equal(changed.any(1).flatten(1).sum(1).double(), result.distances)
    assert bool(changed[:, 1:].any()) == (granularity == "pixel")
    assert (result.distances / fewest(model, x)).median() <= 1.5


def test_no_pixel_can_be_drawn_much_closer() -> None:
    """What the binary search leaves: drawing any changed pixel back by a third loses the other class."""
    x, model = images(6), Linear()
    labels = labels_of(x)
    result = PointwiseAttack("l2", max_queries=2000)(model, x, labels)
    assert result.success.all()
    for row, clean, label in zip(result.adversarials, x, labels, strict=True):
        for place in (row != clean).any(0).nonzero().tolist():
            trial = row.clone()
            trial[:, *place] += (clean - row)[:, *place] / 3
            assert model(trial[None]).argmax(1) == label


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_smaller_changes_where_another_norm_is_wanted(norm: str) -> None:
    x, model = images(6), Linear()
    result = PointwiseAttack(norm, max_queries=2000)(model, x, labels_of(x))
    few = PointwiseAttack(max_queries=2000)(model, x, labels_of(x)).adversarials
    assert (result.distances <= distance(few, x, norm)).all()
    assert result.distances.median() < 0.9 * distance(few, x, norm).median()
