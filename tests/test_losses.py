"""Losses against formulas written out anew, and the weights an attack climbs with."""

import math

import pytest
import torch
from torch import Tensor

from jem_robust_attacks.losses import LOSSES, ascent_weights, cross_entropy, dlr, margin, wrong

LOGITS = torch.tensor([[2.0, 1.0, -1.0, 0.0], [0.0, 3.0, 2.0, 5.0]], dtype=torch.float64)
LABELS = torch.tensor([0, 1])


def test_known_values() -> None:
    assert margin(LOGITS, LABELS).tolist() == [-1, 2]
    expected = [
        math.log(sum(math.exp(v - row[y]) for v in row)) for row, y in zip(LOGITS.tolist(), (0, 1), strict=True)
    ]
    assert cross_entropy(LOGITS, LABELS).tolist() == pytest.approx(expected)
    assert dlr(LOGITS, LABELS).tolist() == pytest.approx([-1 / 2, 2 / 3])


def test_dlr_needs_three_classes() -> None:
    with pytest.raises(ValueError, match="at least 3 classes for the dlr loss, got 2: use the margin"):
        dlr(LOGITS[:, :2], LABELS)


def test_wrong() -> None:
    nan, inf = math.nan, math.inf
    logits = torch.tensor([[1.0, 0.0], [0.0, 1.0], [nan, 0.0], [inf, 0.0], [0.0, -inf], [nan, nan]])
    assert wrong(logits, torch.zeros(6, dtype=torch.int64)).tolist() == [False, True, True, True, True, True]


@pytest.mark.parametrize("name", LOSSES)
def test_weights_are_the_gradient_up_to_scale(name: str) -> None:
    z = LOGITS.clone().requires_grad_()
    (expected,) = torch.autograd.grad(LOSSES[name](z, LABELS).sum(), z)
    expected = expected / expected.abs().amax(1, keepdim=True)
    weights, values = ascent_weights(LOGITS, LABELS, LOSSES[name], 1)
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(values, LOSSES[name](LOGITS, LABELS))


def direction(gap: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return ascent_weights(torch.tensor([[gap, 0.0, -1.0]], dtype=dtype), torch.tensor([0]), cross_entropy, 1)[0]


@pytest.mark.parametrize("gap", [1.0, 30.0, 50.0, 100.0, 700.0])
def test_saturated_cross_entropy_keeps_its_direction(gap: float) -> None:
    # d/dz of -log softmax(z)[0]: (-(p1 + p2), p1, p2), p2 = p1 / e; rounding 1 - p0 to 0 must not lose the first entry.
    torch.testing.assert_close(direction(gap), torch.tensor([[-1.0, math.e / (1 + math.e), 1 / (1 + math.e)]]))


def test_margin_takes_over_where_nothing_is_left() -> None:
    assert direction(1e4).tolist() == [[-1, 1, 0]]
    assert direction(1e30).tolist() == [[-1, 1, 0]]
    assert direction(6e4, torch.float16).tolist() == [[-1, 1, 0]]


def test_draws_share_one_scale() -> None:
    draws = torch.tensor([[1.0, 0.0], [8.0, 0.0]])  # one image, two draws
    weights, _ = ascent_weights(draws, torch.tensor([0, 0]), cross_entropy, 2)
    p = torch.sigmoid(torch.tensor([-1.0, -8.0]))
    torch.testing.assert_close(weights[:, 1], p / p.max())
