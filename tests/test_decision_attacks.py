"""Known answers of the black-box attacks: closed forms, budgets counted from outside, and models nobody can fool."""

import numpy as np
import pytest
import torch

from jem_robust_attacks import BoundaryAttack, PointwiseAttack, RayS, Square

SHAPE = (1, 6, 6)
MINIMISING = [
    BoundaryAttack("l2", max_queries=300),
    BoundaryAttack("linf", max_queries=300),
    PointwiseAttack("l0", max_queries=300),
    PointwiseAttack("l2", max_queries=300),
    RayS(max_queries=300),
]
ALL = [*MINIMISING, Square("linf", max_queries=300), Square("l2", max_queries=300)]


class Spy:
    """A model with protocol that counts draws an image."""

    bounds = (0.0, 1.0)

    def __init__(self, logits, deterministic=True):
        self.logits, self.deterministic, self.draws = logits, deterministic, {}

    def draw(self, images, image_ids, draw_ids, purpose, seed):
        for i in image_ids.tolist():
            self.draws[i] = self.draws.get(i, 0) + 1
        return self.logits(images, image_ids, draw_ids)


def world(n=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(36, generator=generator, dtype=torch.float64)
    x = 0.3 + 0.4 * torch.rand(n, *SHAPE, generator=generator, dtype=torch.float64)
    bias = -(x.flatten(1) @ weight).median()
    value = x.flatten(1) @ weight + bias
    return weight, bias, x, (value > 0).long(), value.abs()


def linear(weight, bias):
    def logits(x, ids=None, draws=None):
        value = x.flatten(1) @ weight.to(x.dtype) + bias.to(x.dtype)
        return torch.stack([-value, value], 1)

    return logits


def fewest_pixels(weight, x, y, value):
    """Pixels moved to the bound that helps, the most helpful first, until the sign turns."""
    flat = x.flatten(1)
    wanted = torch.where(y == 1, -1.0, 1.0)[:, None] * weight
    gain = torch.where(wanted > 0, (1 - flat) * wanted, -flat * wanted).sort(1, descending=True).values.cumsum(1)
    return (gain < value[:, None]).sum(1) + 1


@pytest.mark.parametrize(
    ("attack", "norm"),
    [(BoundaryAttack("l2", max_queries=3000), 2), (RayS(max_queries=3000), 1), (PointwiseAttack(max_queries=3000), 0)],
)
def test_distances_to_a_linear_boundary(attack, norm):
    weight, bias, x, y, value = world()
    x, y, value = x[value > 0.05], y[value > 0.05], value[value > 0.05]
    result = attack(linear(weight, bias), x, y)
    assert result.success.all()
    if norm == 0:
        ratio = result.distances / fewest_pixels(weight, x, y, value)
        assert ratio.median() <= 1.5
    else:
        ratio = result.distances / (value / weight.norm(p=norm))
        assert ratio.median() <= 1.05
    assert (ratio >= 1 - 1e-6).all()
    assert (linear(weight, bias)(result.adversarials).argmax(1) != y).all()


@pytest.mark.parametrize("attack", MINIMISING, ids=repr)
def test_an_image_on_the_boundary_itself_is_no_accident(attack):
    weight, bias, x, y, value = world()
    on_it = value.argmin()[None]  # the median, where a tie is broken for its label
    assert value[on_it] < 1e-12
    result = attack(linear(weight, bias), x[on_it], y[on_it])
    assert torch.isfinite(result.adversarials).all()


@pytest.mark.parametrize("attack", ALL, ids=repr)
def test_rules_on_a_deterministic_model(attack):
    weight, bias, x, y, _ = world(6)
    y[0] = 1 - y[0]  # wrong from the start
    eps = None if attack.minimizes else 0.3 if attack.norm == "linf" else 1.5
    state, kept = torch.get_rng_state(), x.clone()
    spy = Spy(linear(weight, bias))
    result = attack(spy, x, y, eps=eps, seed=3)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(x, kept)
    assert result.distances[0] == 0
    assert torch.equal(result.adversarials[0], x[0])
    assert [spy.draws[i] for i in range(6)] == result.queries.tolist()
    assert (result.queries <= 300).all()
    assert result.success.all()
    assert result.adversarials.dtype == x.dtype
    assert result.adversarials.min() >= 0
    assert result.adversarials.max() <= 1
    order = torch.tensor([4, 1, 5])
    some = attack(Spy(linear(weight, bias)), x[order], y[order], eps=eps, seed=3, image_ids=order)
    torch.testing.assert_close(some.adversarials[1], result.adversarials[1])


@pytest.mark.parametrize("attack", ALL, ids=repr)
def test_what_cannot_be_fooled_is_not(attack):
    _, _, x, _, _ = world(4)
    eps = None if attack.minimizes else 0.2
    constant = attack(Spy(lambda z, i, d: torch.tensor([[1.0, 0.0]]).repeat(len(z), 1)), x, [0] * 4, eps=eps)
    assert torch.isinf(constant.distances).all()
    assert torch.equal(constant.adversarials, x)

    def coin(images, ids, draws):
        flips = [np.random.default_rng([int(i), int(d)]).integers(2) for i, d in zip(ids, draws, strict=True)]
        return torch.nn.functional.one_hot(torch.tensor(flips), 2).double()

    spy = Spy(coin, deterministic=False)
    flipped = attack(spy, x, [0] * 4, eps=eps)
    assert not flipped.success.any()
    assert torch.isinf(flipped.distances).all()
    assert max(spy.draws.values()) <= 300
    assert flipped.queries.tolist() == [spy.draws[i] for i in range(4)]


@pytest.mark.parametrize("attack", ALL, ids=repr)
def test_empty_batches_and_nan_models(attack):
    _, _, x, _, _ = world(2)
    eps = None if attack.minimizes else 0.2
    empty = attack(Spy(lambda z, i, d: z.flatten(1)[:, :2]), x[:0], [], eps=eps)
    assert empty.adversarials.shape == (0, *SHAPE)
    broken = attack(Spy(lambda z, i, d: z.flatten(1)[:, :2] * torch.nan), x, [0, 0], eps=eps)
    assert (broken.distances == 0).all()  # wrong as they are
