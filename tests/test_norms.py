"""Names, numbers, distances and projections, whose answers are known or must hold whatever the numbers."""

import math
from fractions import Fraction
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jem_robust_attacks.norms import distance, parse_epsilon, parse_norm, project, random_offset, rounded, steepest

BOX = (0.0, 1.0)
UNIT = st.floats(0, 1, width=16)


@pytest.mark.parametrize(
    ("given", "name"),
    [(n, "linf") for n in ("linf", "Linf", "inf", " LINF ", float("inf"), np.inf, np.float64("inf"))]
    + [(n, "l2") for n in ("l2", "L2", "2", 2, 2.0, np.int64(2))],
)
def test_norm_names(given: Any, name: str) -> None:
    assert parse_norm(given) == name


@pytest.mark.parametrize("junk", ["l1", 1, "", None, "l0", 0, float("nan"), -2, "-inf", True, ["l2"], "linfinity"])
def test_junk_norms(junk: Any) -> None:
    with pytest.raises(ValueError, match="expected a norm out of linf, l2, got"):
        parse_norm(junk)


def test_l0_where_allowed() -> None:
    assert parse_norm("L0", ("l0",)) == parse_norm(0, ("l0",)) == "l0"
    with pytest.raises(ValueError, match="out of l0"):
        parse_norm("linf", ("l0",))


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ("8/255", 8 / 255), (" 8 / 255 ", 8 / 255), ("0.5/255", 0.5 / 255), ("0", 0.0), (0, 0.0), (".03", 0.03),
        (np.float32(0.5), 0.5), (Fraction(8, 255), 8 / 255), (np.float64(8 / 255), 8 / 255), ("1e-6", 1e-6), (3, 3.0),
    ],
)  # fmt: skip
def test_epsilons(given: Any, value: float) -> None:
    assert parse_epsilon(given) == value


@pytest.mark.parametrize(
    "junk",
    ["nan", float("nan"), -1, "-1", "-1/255", "8/0", "0/0", "eight", "", "8/", "/8", "inf", float("inf"), "8/inf",
     "1/2/3", None, True, [0.1], "1e999", 10**400, "nan/1"],
)  # fmt: skip
def test_junk_epsilons(junk: Any) -> None:
    with pytest.raises(ValueError, match="expected an epsilon such as"):
        parse_epsilon(junk)


def test_distances() -> None:
    a, b = torch.zeros(2, 2, 2, 2), torch.zeros(2, 2, 2, 2)
    b[0, :, 0, 0] = torch.tensor([0.3, -0.4])
    assert distance(a, b, "linf").tolist() == pytest.approx([0.4, 0])
    assert distance(a, b, "l2").tolist() == pytest.approx([0.5, 0])
    assert distance(a, b, "l0").tolist() == [1, 0]
    assert distance(torch.zeros(2, 3), torch.eye(2, 3), "l0").tolist() == [1, 1]


@pytest.mark.parametrize("norm", ["linf", "l2", "l0"])
@pytest.mark.parametrize("shape", [(0, 1, 2, 2), (2, 0, 2, 2), (0, 5)])
def test_distance_of_nothing(norm: str, shape: tuple[int, ...]) -> None:
    assert distance(torch.zeros(shape), torch.zeros(shape), norm).tolist() == [0.0] * shape[0]


def assert_kept(x: Tensor, center: Tensor, epsilon: float, norm: str) -> None:
    saved, original = x.numpy().astype(np.float32), center.numpy().astype(np.float32)
    assert saved.min() >= 0
    assert saved.max() <= 1
    far = distance(torch.from_numpy(saved), torch.from_numpy(original), norm)
    assert far.max() <= epsilon + 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("norm", ["linf", "l2"])
@given(
    center=hnp.arrays(np.float64, (2, 1, 3, 4), elements=UNIT),
    delta=hnp.arrays(np.float64, (2, 1, 3, 4), elements=st.floats(-3, 3)),
    epsilon=st.one_of(st.floats(0, 2), st.floats(0, 1e-5), st.just(8 / 255)),
)
@settings(max_examples=60, deadline=None)
def test_projection_keeps_ball_and_box(dtype: torch.dtype, norm: str, center: Any, delta: Any, epsilon: float) -> None:
    c = torch.from_numpy(center).to(dtype)
    x = project(torch.from_numpy(center + delta).to(dtype), c, epsilon, norm, BOX)
    assert x.dtype == dtype
    assert_kept(x, c, epsilon, norm)
    inside = torch.where(distance(x, c, norm).view(-1, 1, 1, 1) > 0, x, c)
    assert_kept(project(inside, c, epsilon, norm, BOX), c, epsilon, norm)  # and stays there when repeated


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("epsilon", [1e-6, 0.5, 40.0])
def test_projection_of_large_images(dtype: torch.dtype, epsilon: float) -> None:
    generator = torch.Generator().manual_seed(0)
    center = torch.rand(2, 3, 224, 224, generator=generator).to(dtype)
    x = (center + torch.randn(center.shape, generator=generator)).to(dtype)
    for norm in ("linf", "l2"):
        assert_kept(project(x, center, epsilon, norm, BOX), center, epsilon, norm)


def test_projection_known_answers() -> None:
    center = torch.full((1, 1, 1, 2), 0.5)
    x = torch.tensor([[[[0.9, 0.8]]]])
    assert project(x, center, 0.1, "linf", BOX).flatten().tolist() == pytest.approx([0.6, 0.6])
    assert project(x, center, 0.25, "l2", BOX).flatten().tolist() == pytest.approx([0.7, 0.65])
    assert torch.equal(project(center, center, 0.0, "l2", BOX), center)
    assert torch.equal(project(x, center, 0.5, "l2", BOX), x)


def test_rounding_towards_the_center() -> None:
    center = torch.tensor([0.5, 0.5, 0.5], dtype=torch.float16)
    x = torch.tensor([0.7, 0.3, 0.5], dtype=torch.float64)
    near = rounded(x, center, torch.float16).double()
    assert near[0] <= 0.7 < near[0] + 2**-10
    assert near[1] - 2**-10 < 0.3 <= near[1]
    assert near[2] == 0.5


def test_steepest() -> None:
    g = torch.tensor([[3.0, -4.0], [0.0, 0.0], [3e-30, -4e-30], [math.nan, 1.0], [math.inf, -2.0]])
    assert steepest(g, "linf").tolist() == [[1, -1], [0, 0], [1, -1], [0, 1], [0, -1]]
    assert steepest(g, "l2").tolist() == [
        pytest.approx([0.6, -0.8]), [0, 0], pytest.approx([0.6, -0.8]), [0, 1], [0, -1],
    ]  # fmt: skip
    assert steepest(torch.zeros(0, 1, 2, 2), "l2").shape == (0, 1, 2, 2)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_random_offsets_fill_the_ball(norm: str) -> None:
    rng = np.random.default_rng(0)
    offsets = torch.stack([random_offset((1, 1, 2), 0.5, norm, rng) for _ in range(4000)])
    far = distance(offsets, torch.zeros_like(offsets), norm)
    assert far.max() <= 0.5
    # Half the radius holds a quarter of a two-dimensional ball, in either norm.
    assert float((far < 0.25).double().mean()) == pytest.approx(0.25, abs=0.03)
    assert offsets.mean(0).abs().max() < 0.02
