"""PGD where the answer is known: linear classifiers, coin flips, broken and saturated networks."""

import pytest
import torch
from torch import Tensor, nn

from jem_robust_attacks import PGD
from tests.linear_world import NORMS, SHAPE, Model, assert_valid, noisy, world


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("loss", ["ce", "margin"])
@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_linear_closed_form(norm: str, loss: str, scale: float, dtype: torch.dtype) -> None:
    linear, images, labels, weight = world()
    z = linear(images)
    gap = z.gather(1, labels[:, None]).squeeze(1) - z.gather(1, 1 - labels[:, None]).squeeze(1)
    needed = gap / (weight[0] - weight[1]).norm(p=1 if norm == "linf" else 2)
    for eps in needed.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist():
        result = PGD(norm, steps=5, loss=loss)(lambda x: scale * linear(x), images.to(dtype), labels, eps)
        assert torch.equal(result.success, needed < eps)
        assert_valid(result, images.to(dtype), norm, eps)


def test_dlr_of_three_classes_climbs_and_two_are_refused() -> None:
    linear, images, labels, _ = world(classes=3)
    assert PGD(loss="dlr", steps=10)(linear, images, labels, 0.2).success.all()
    linear, images, labels, _ = world()
    with pytest.raises(ValueError, match="at least 3 classes"):
        PGD(loss="dlr")(linear, images, labels, 0.2)


@pytest.mark.parametrize("norm", NORMS)
def test_zero_epsilon_returns_the_images_bitwise(norm: str) -> None:
    linear, images, labels, _ = world()
    images = images.float()
    labels[:3] = 1 - labels[:3]  # clean mistakes
    result = PGD(norm, restarts=3)(linear, images, labels, 0)
    assert torch.equal(result.adversarials, images)
    assert result.success.tolist() == [True] * 3 + [False] * 37
    assert result.distances[:3].tolist() == [0, 0, 0]
    candidates, _ = PGD(norm).search(linear, images, labels, "0/255")
    assert torch.equal(candidates, images.unsqueeze(1))


def test_a_wrong_clean_image_stays_where_it_is() -> None:
    linear, images, labels, _ = world()
    result = PGD(steps=5)(linear, images, 1 - labels, 0.1)
    assert result.success.all()
    assert result.distances.eq(0).all()


@pytest.mark.parametrize("norm", NORMS)
def test_zero_gradients(norm: str) -> None:
    _, images, labels, _ = world()
    constant = torch.tensor([1.0, 0.0], dtype=torch.float64)
    result = PGD(norm, steps=3, restarts=2)(lambda x: constant + 0 * x.sum((1, 2, 3))[:, None], images, labels, 0.1)
    assert torch.isfinite(result.candidates).all()  # type: ignore[arg-type]
    assert torch.equal(result.success, labels == 1)
    assert not result.nonfinite.any()  # type: ignore[union-attr]


def test_a_model_without_gradient_warns() -> None:
    linear, images, labels, _ = world()
    for model in (lambda x: linear(x).detach(), lambda x: torch.ones(len(x), 2, requires_grad=True) * 1):
        with pytest.warns(UserWarning, match="carry no gradient back"):
            PGD(steps=2)(model, images, labels, 0.1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_logits_are_never_robust(value: float) -> None:
    linear, images, labels, _ = world()

    def broken(x: Tensor) -> Tensor:
        z = linear(x)
        return torch.where(torch.arange(len(x))[:, None] % 2 == 0, torch.full_like(z, value), z)

    result = PGD(steps=3)(broken, images, labels, 1e-9)
    assert result.success.tolist() == [i % 2 == 0 for i in range(40)]
    assert result.nonfinite.tolist() == [i % 2 == 0 for i in range(40)]  # type: ignore[union-attr]


def test_one_infinite_logit_and_nan_gradients_are_flagged() -> None:
    linear, images, labels, _ = world()
    infinite = torch.tensor([float("inf"), 0.0], dtype=torch.float64)
    result = PGD(steps=2)(lambda x: linear(x) + infinite, images, labels * 0, 0.1)
    assert result.success.all()
    assert result.nonfinite.all()  # type: ignore[union-attr]

    def kinked(x: Tensor) -> Tensor:  # finite logits, but sqrt at 0 has no finite derivative
        return linear(x) + (x - x.detach()).sum((1, 2, 3), keepdim=True).flatten(1).sqrt()

    result = PGD(steps=2, restarts=2)(kinked, images, labels, 1e-9)
    assert not result.success.any()
    assert result.nonfinite.all()  # type: ignore[union-attr]
    assert torch.isfinite(result.candidates).all()  # type: ignore[arg-type]


def test_nan_found_on_the_way_is_kept_as_a_candidate() -> None:
    linear, images, labels, _ = world()
    middle = images.mean((1, 2, 3))

    def hole(x: Tensor) -> Tensor:  # NaN a little away from each image
        moved = (x.mean((1, 2, 3))[:, None] - middle).abs().amin(1) > 1e-6
        return torch.where(moved[:, None], torch.nan, linear(x))

    result = PGD(steps=10)(hole, images, labels, 0.02)
    assert result.success.all()
    assert result.nonfinite.all()  # type: ignore[union-attr]


def clean_errors(model: Model, images: Tensor, labels: Tensor, draws: int = 400) -> Tensor:
    generator_state = torch.get_rng_state()
    wrong = torch.stack([model(images).argmax(1) != labels for _ in range(draws)]).double().mean(0)
    torch.set_rng_state(generator_state)
    return wrong


@pytest.mark.parametrize("norm", NORMS)
def test_tiny_perturbations_gain_nothing_on_noisy_models(norm: str) -> None:
    model, images, labels = noisy(0.1)
    labels[:10] = 1 - labels[:10]
    share = clean_errors(model, images, labels)
    clear = (share < 0.15) | (share > 0.85)  # an even majority of ten draws is then practically sure
    result = PGD(norm, steps=3, restarts=20, eot=1)(model, images, labels, 1e-6)
    assert clear.sum() > 15
    assert torch.equal(result.success[clear], share[clear] > 0.5)


@pytest.mark.parametrize("shared", [False, True])
def test_coin_flips_get_one_verdict(shared: bool) -> None:
    images, labels = (
        torch.full((600 if not shared else 30, *SHAPE), 0.5),
        torch.zeros(600 if not shared else 30, dtype=torch.int64),
    )

    def coin(x: Tensor) -> Tensor:
        rows = 1 if shared else len(x)
        return torch.randn(rows, 2) + 0 * x.sum((1, 2, 3))[:, None]

    runs = [PGD(steps=1, restarts=5, eot=1)(coin, images, labels, 1e-6, seed=s) for s in range(20 if shared else 1)]
    rate = float(torch.cat([r.success for r in runs]).double().mean())
    # One verdict on ten draws, a tie being wrong: P(Bin(10, 1/2) >= 5) = .623. Two chances would give .86.
    assert rate == pytest.approx(0.623, abs=0.06 if not shared else 0.33)
    if shared:
        assert len({int(r.success.sum()) for r in runs}) == 2  # a call shares its noise: all or none


def test_a_smooth_network_reaches_the_first_order_optimum() -> None:
    """On a nearly linear stretch the loss gained in a small ball is eps times the gradient's dual norm."""
    generator = torch.Generator().manual_seed(0)
    w1, w2 = torch.randn(16, 8, generator=generator).double() / 4, torch.randn(8, 3, generator=generator).double()

    def network(x: Tensor) -> Tensor:
        return torch.tanh(x.flatten(1) @ w1) @ w2

    _, images, _, _ = world()
    labels = network(images).argmax(1)
    leaf = images.clone().requires_grad_()
    nn.functional.cross_entropy(network(leaf), labels, reduction="sum").backward()
    assert leaf.grad is not None
    for norm, dual in (("linf", 1), ("l2", 2)):
        eps = 1e-4
        found = PGD(norm, steps=20).search(network, images, labels, eps)[0][:, 0]
        before, after = (nn.functional.cross_entropy(network(x), labels, reduction="none") for x in (images, found))
        torch.testing.assert_close(
            (after - before) / eps, leaf.grad.flatten(1).norm(p=dual, dim=1), rtol=1e-2, atol=1e-6
        )
