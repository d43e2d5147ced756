import math

import numpy as np
import pytest
import torch

from jem_robust.langevin import Refinement, refine, score, score_graph, step
from tests.worlds import GaussianEnergy, LinearNet, images

NO_BOUNDS = (-math.inf, math.inf)


def no_noise(t):
    raise AssertionError(f"noise of step {t} asked for")


def test_defaults_are_the_contract():
    r = Refinement()
    assert (r.steps, r.step_size, r.noise, r.init_noise, r.chains, r.clamp, r.gradient_clamp) == (
        10, 1.0, 0.01, 0.0, 5, False, None,
    )  # fmt: skip
    with pytest.raises(AttributeError):
        r.steps = 3


@pytest.mark.parametrize(
    ("norm", "init_noise"), [("linf", 0.03), ("Linf", 0.03), ("inf", 0.03), ("l2", 0.0), ("L2", 0.0), ("2", 0.0)]
)
def test_paper_commands(norm, init_noise):
    assert Refinement.paper(norm, 10) == Refinement(10, 1.0, 0.01, init_noise, 5)
    plain = Refinement.paper(norm, 0)
    assert (plain.steps, plain.init_noise, plain.independent_chains, plain.random) == (0, 0.0, 1, False)


def test_paper_refuses_other_norms():
    with pytest.raises(ValueError, match="linf or l2"):
        Refinement.paper("l1", 10)


@pytest.mark.parametrize(
    "bad",
    [
        {"steps": -1}, {"steps": 1.5}, {"steps": True}, {"chains": 0}, {"chains": "5"}, {"step_size": -1.0},
        {"step_size": math.nan}, {"step_size": "1"}, {"noise": math.inf}, {"noise": None}, {"init_noise": -0.1},
        {"gradient_clamp": 0.0}, {"gradient_clamp": -1.0}, {"gradient_clamp": math.nan}, {"gradient_clamp": "1"},
    ],
)  # fmt: skip
def test_impossible_settings_are_refused_by_name(bad):
    with pytest.raises((ValueError, TypeError), match=next(iter(bad))):
        Refinement(**bad)


def test_numpy_floats_are_numbers():
    assert Refinement(step_size=np.float32(0.5), noise=np.float64(0.1), init_noise=0).noise == 0.1


def test_zero_steps_drop_start_noise_and_chains_unless_asked_in_the_same_call():
    base = Refinement(steps=10, init_noise=0.03)
    assert base.updated(steps=0) == Refinement(steps=0, init_noise=0.0, chains=1)
    assert base.updated(steps=0, init_noise=0.03) == Refinement(steps=0, init_noise=0.03, chains=5)
    assert base.updated(steps=0, init_noise=0.03, chains=2).updated(clamp=True).init_noise == 0.03
    assert base.updated(steps=0, init_noise=0).independent_chains == 1
    assert base.updated(steps=3).init_noise == 0.03
    with pytest.raises(TypeError, match="speed"):
        base.updated(speed=1)


@pytest.mark.parametrize(
    ("settings", "random"),
    [
        ({}, True), ({"noise": 0.0}, False), ({"steps": 0}, False), ({"steps": 0, "init_noise": 0.1}, True),
        ({"noise": 0.0, "init_noise": 0.1}, True),
    ],
)  # fmt: skip
def test_random_and_chains_worth_running(settings, random):
    r = Refinement(**settings)
    assert r.random is random
    assert r.independent_chains == (5 if random else 1)


def test_score_of_a_gaussian_in_every_grad_mode():
    x, energy = images(3), GaussianEnergy(0.5, 0.2)
    expected = -0.5 * (x - 0.2)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            got = score(energy, x)
        torch.testing.assert_close(got, expected)
        assert not got.requires_grad
    with torch.inference_mode():
        made = x.clone()
    torch.testing.assert_close(score(energy, made), expected)


@pytest.mark.parametrize("how", [score, score_graph])
def test_a_density_without_dependence_on_x_is_refused(how):
    outside = torch.ones((), requires_grad=True)
    for energy in (lambda x: x.detach().sum((1, 2, 3)), lambda x: outside * x.detach().sum((1, 2, 3))):
        with pytest.raises(ValueError, match="depend on x"):
            how(energy, images(2))


def test_one_step_by_hand():
    x, noise = torch.tensor([1.0, -1.0]), torch.tensor([2.0, 3.0])
    r = Refinement(step_size=0.5, noise=0.1, gradient_clamp=1.0)
    torch.testing.assert_close(step(x, torch.tensor([10.0, -0.5]), noise, r), torch.tensor([1.7, -0.95]))
    torch.testing.assert_close(step(x, torch.tensor([10.0, -0.5]), None, r), torch.tensor([1.5, -1.25]))


def test_chain_on_a_gaussian_has_its_closed_form():
    """Each step is x - m <- (1 - a c)(x - m) + s xi."""
    c, m, T = 0.5, 0.2, 7
    r = Refinement(steps=T, step_size=0.3, noise=0.05, init_noise=0.1)
    x = images(4)
    noise = [images(4, seed=t) - 0.5 for t in range(T + 1)]
    got = refine(x, lambda s, t: score(GaussianEnergy(c, m), s), lambda t: noise[t], r, NO_BOUNDS)
    k = 1 - 0.3 * c
    expected = k**T * (x + 0.1 * noise[0] - m) + m + sum(0.05 * k ** (T - t) * noise[t] for t in range(1, T + 1))
    torch.testing.assert_close(got, expected)


def test_clamp_applies_after_each_step_and_not_to_the_start():
    r = Refinement(steps=1, step_size=0.0, noise=0.0, init_noise=1.0, clamp=True)
    x = torch.full((1, 1, 2, 2), 0.5)
    zero = torch.zeros_like(x)
    assert torch.equal(refine(x, lambda s, t: zero, lambda t: zero + 2, r, (-1, 1)), zero + 1)
    still = r.updated(steps=0, init_noise=1.0)
    assert torch.equal(refine(x, lambda s, t: zero, lambda t: zero + 2, still, (-1, 1)), x + 2)


def test_no_noise_is_generated_where_none_is_used():
    r = Refinement(steps=2, noise=0.0, init_noise=0.0)
    refine(images(1), lambda s, t: torch.zeros_like(s), no_noise, r, NO_BOUNDS)


def test_linear_log_density_has_constant_score():
    network = LinearNet(classes=1)
    got = score(lambda x: network(x)[:, 0], images(2))
    torch.testing.assert_close(got.flatten(1), network.weight.detach().expand(2, -1))
