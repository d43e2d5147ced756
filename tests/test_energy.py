import math

import pytest
import torch

from jem_robust.energy import aggregate_chains, log_px, log_pxy, log_py_given_x

LOGITS = torch.tensor([[0.0, math.log(3.0)], [math.log(2.0), 0.0]], dtype=torch.float64)
CHAINS = torch.tensor([[[2.0, 0.0, 0.0], [2.0, 1.0, 0.0], [0.0, 3.0, 0.0]]], dtype=torch.float64)


def test_known_densities():
    torch.testing.assert_close(log_px(LOGITS).exp(), torch.tensor([4.0, 3.0], dtype=torch.float64))
    torch.testing.assert_close(log_pxy(LOGITS, torch.tensor([1, 1])).exp(), torch.tensor([3.0, 1.0]).double())
    torch.testing.assert_close(log_py_given_x(LOGITS).exp()[0], torch.tensor([0.25, 0.75], dtype=torch.float64))


def test_joint_is_marginal_plus_conditional_also_for_large_logits():
    logits = torch.randn(5, 2, 7, generator=torch.Generator().manual_seed(0)).double() * 1e4
    labels = torch.arange(10).reshape(5, 2) % 7
    conditional = log_py_given_x(logits).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(log_pxy(logits, labels), log_px(logits) + conditional)


def test_known_aggregates():
    torch.testing.assert_close(aggregate_chains(CHAINS, "logits"), torch.tensor([[4 / 3, 4 / 3, 0.0]]).double())
    torch.testing.assert_close(aggregate_chains(CHAINS, "probabilities").exp(), CHAINS.softmax(2).mean(1))
    shares = aggregate_chains(CHAINS, "vote")
    torch.testing.assert_close(shares.exp(), torch.tensor([[2 / 3, 1 / 3, 0.0]]).double())
    assert torch.isfinite(shares).all()


@pytest.mark.parametrize("how", ["logits", "probabilities", "vote"])
def test_one_chain_keeps_the_decision(how):
    logits = CHAINS.transpose(0, 1)
    assert torch.equal(aggregate_chains(logits, how).argmax(1), logits[:, 0].argmax(1))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("how", ["logits", "probabilities", "vote"])
def test_a_broken_chain_stays_visible_in_its_image_alone(how, bad):
    logits = CHAINS.repeat(2, 1, 1)
    logits[0, 1, 2] = bad
    out = aggregate_chains(logits, how)
    assert not torch.isfinite(out[0]).all()
    assert torch.isfinite(out[1]).all()


def test_the_vote_has_the_gradient_of_the_mean_and_the_same_value_with_and_without():
    logits = (CHAINS * 1e6).requires_grad_()
    out = aggregate_chains(logits, "vote")
    assert torch.equal(out.detach(), aggregate_chains(logits.detach(), "vote"))
    weights = torch.tensor([[1.0, -2.0, 5.0]], dtype=torch.float64)
    (gradient,) = torch.autograd.grad((out * weights).sum(), logits)
    (expected,) = torch.autograd.grad((logits.mean(1) * weights).sum(), logits)
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("how", ["logits", "probabilities", "vote"])
def test_no_images(how):
    assert aggregate_chains(torch.zeros(0, 5, 3), how).shape == (0, 3)
