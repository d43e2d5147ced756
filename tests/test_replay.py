"""Starts of training chains against numpy, and the buffer they come from."""

import numpy as np
import pytest
import torch
from torch import Tensor

from jem_robust.training.replay import ClassGaussianStarts, ReplayBuffer, UniformStarts

WIDE = (-1e5, 1e5)  # bounds that never clip


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def data() -> tuple[Tensor, Tensor]:
    mix = torch.randn(2, 6, 6, generator=generator(1))
    labels = torch.arange(400) % 2
    noise = torch.randn(400, 6, generator=generator(2))
    flat = torch.einsum("nij,nj->ni", mix[labels], noise) + 1000 * labels[:, None]
    return flat.view(400, 1, 2, 3), labels


def test_class_gaussians_have_each_class_mean_and_covariance() -> None:
    images, labels = data()
    starts = ClassGaussianStarts(images, labels, WIDE, jitter=0.5)
    for label in (0, 1):
        members = images[labels == label].flatten(1).double().numpy()
        covariance = np.cov(members.T, bias=True)
        factor = starts.factors[label].double().numpy()
        np.testing.assert_allclose(starts.means[label].flatten(), members.mean(0), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(factor @ factor.T, covariance, atol=1e-4)
    drawn = starts.sample(40_000, generator()).flatten(1).double().numpy()
    second = drawn[:, 0] > 500
    assert second.mean() == pytest.approx(0.5, abs=0.02)
    members = images[labels == 1].flatten(1).double().numpy()
    covariance = np.cov(members.T, bias=True) + 0.25 * np.eye(6)
    np.testing.assert_allclose(np.cov(drawn[second].T), covariance, atol=0.05 * covariance.max())
    assert drawn[second].mean(0) == pytest.approx(members.mean(0), abs=0.15)


@pytest.mark.parametrize("rank", [0, 1, 3, 6, 50])
def test_rank_keeps_the_leading_directions(rank: int) -> None:
    images, labels = data()
    starts = ClassGaussianStarts(images, labels, WIDE, rank=rank)
    kept = min(rank, 6)
    assert starts.factors.shape == (2, 6, kept)
    members = images[labels == 0].flatten(1).double().numpy()
    leading = np.linalg.eigvalsh(np.cov(members.T, bias=True))[6 - kept :]
    np.testing.assert_allclose(starts.factors[0].double().pow(2).sum(0), leading, rtol=1e-4)
    assert starts.sample(3, generator()).shape == (3, 1, 2, 3)


def test_starts_lie_within_bounds() -> None:
    images, labels = data()
    drawn = ClassGaussianStarts(images, labels, (-1.0, 1.0)).sample(100, generator())
    assert drawn.min() >= -1
    assert drawn.max() <= 1
    uniform = UniformStarts((3, 8, 8), (-1.0, 3.0)).sample(500, generator())
    assert uniform.shape == (500, 3, 8, 8)
    assert (float(uniform.min()), float(uniform.max())) == pytest.approx((-1, 3), abs=0.01)
    assert float(uniform.mean()) == pytest.approx(1, abs=0.02)
    assert float(uniform.std()) == pytest.approx(4 / 12**0.5, abs=0.02)


def buffer(restart: float, size: int = 1001) -> ReplayBuffer:
    return ReplayBuffer(UniformStarts((1, 1, 1), (0.0, 1.0)), size, restart, generator())


@pytest.mark.parametrize("restart", [0.0, 0.05, 1.0])
def test_restart_share(restart: float) -> None:
    replay = buffer(restart)
    assert replay.samples.shape == (1001, 1, 1, 1)
    replay.samples.fill_(7)  # what is no restart is a 7
    states, slots = replay.draw(20_000)
    assert float((states != 7).double().mean()) == pytest.approx(restart, abs=0.01)
    assert set(slots.tolist()) == set(range(1001))
    assert replay.samples.eq(7).all()  # drawing stores nothing


def test_put_back_stores_in_order() -> None:
    replay = buffer(0.0, 5)
    before = replay.samples.clone()
    replay.put_back(torch.tensor([3, 1, 3]), torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1, 1))
    assert replay.samples.flatten()[[3, 1]].tolist() == [3, 2]
    assert torch.equal(replay.samples[[0, 2, 4]], before[[0, 2, 4]])


def test_only_its_own_generator() -> None:
    state = torch.get_rng_state()
    first, second = buffer(0.5), buffer(0.5)
    assert torch.equal(first.draw(50)[0], second.draw(50)[0])
    assert torch.equal(torch.get_rng_state(), state)
