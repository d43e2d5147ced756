import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import binomtest
from sklearn.isotonic import IsotonicRegression

from jem_robust.evaluation.verdict import bootstrap_interval, clopper_pearson, monotone, paired_difference, score


class Scripted:
    """Draw d of image i says class answers[i][d]; the margin is the image's mean."""

    bounds, deterministic = (0.0, 1.0), False

    def __init__(self, answers: list[list[float]]) -> None:
        self.answers = torch.tensor(answers)

    def draw(self, images, image_ids, draw_ids, purpose, seed):
        value = self.answers[image_ids, draw_ids]
        return torch.stack([torch.zeros_like(value), value], 1)


def run(answers, labels, batch=512):
    target = Scripted(answers)
    n = len(answers)
    x, ids = torch.zeros(n, 1, 1, 1), torch.arange(n)
    return score(target, x, torch.tensor(labels), ids, range(len(answers[0])), "select", 0, batch)


def test_score_counts_correct_draws_and_averages_the_margin_of_the_label():
    result = run([[1.0, 2.0, -3.0, 4.0], [-1.0, -1.0, -1.0, 5.0]], [1, 0])
    assert result.correct.tolist() == [3, 3]
    assert result.margin.tolist() == [1.0, -0.5]
    assert not result.nonfinite.any()


def test_score_is_the_same_however_it_is_batched():
    answers = torch.randn(11, 5, generator=torch.Generator().manual_seed(0)).tolist()
    whole, single = run(answers, [0, 1] * 5 + [0]), run(answers, [0, 1] * 5 + [0], batch=1)
    assert torch.equal(whole.correct, single.correct)
    assert torch.equal(whole.margin, single.margin)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_draw_is_wrong_and_attracts_the_attacker(bad):
    result = run([[bad, 3.0], [3.0, 3.0]], [1, 1])
    assert result.correct.tolist() == [1, 2]
    assert result.margin[0] == -torch.inf
    assert result.nonfinite.tolist() == [True, False]


@given(arrays(float, st.tuples(st.integers(1, 3), st.integers(1, 8)), elements=st.floats(0, 1)))
@settings(max_examples=50, deadline=None)
def test_monotone_is_the_isotonic_regression_of_scikit_learn(raw):
    x = np.arange(raw.shape[1])
    expected = [IsotonicRegression(increasing=False).fit_transform(x, row) for row in raw]
    np.testing.assert_allclose(monotone(raw), expected, atol=1e-12)


@pytest.mark.parametrize(("hits", "n"), [(0, 10), (10, 10), (3, 17), (64, 100)])
def test_clopper_pearson_is_scipys(hits, n):
    interval = binomtest(hits, n).proportion_ci(0.95, "exact")
    np.testing.assert_allclose(clopper_pearson(hits, n), (interval.low, interval.high), atol=1e-12)


def test_the_bootstrap_covers_and_contains_the_point():
    rng = np.random.default_rng(0)
    inside = 0
    for trial in range(200):
        p = (rng.uniform(size=(1, 80)) < 0.7).astype(float)
        low, high = bootstrap_interval(p, trial)
        inside += low[0] <= 0.7 <= high[0]
        assert low[0] <= p.mean() <= high[0]
    assert 180 <= inside <= 199  # 95 %, within what 200 trials can show


def test_where_all_images_agree_the_interval_is_clopper_pearsons():
    low, high = bootstrap_interval(np.stack([np.ones(20), np.zeros(20)]), 0)
    np.testing.assert_allclose([low[0], high[0]], clopper_pearson(20, 20))
    np.testing.assert_allclose([low[1], high[1]], clopper_pearson(0, 20))


def test_paired_difference_is_narrower_than_unpaired_for_the_same_images():
    rng = np.random.default_rng(1)
    a = rng.uniform(size=200)
    mean, low, high = paired_difference(a, a - 0.1)
    assert low <= mean <= high
    np.testing.assert_allclose([low, mean, high], 0.1, atol=1e-12)
    with pytest.raises(ValueError, match="same images"):
        paired_difference(a, a[:5])
