"""Rules that PGD keeps whatever the model: counting, keyed randomness, dtypes, nothing touched, bad input."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from jem_robust_attacks import PGD
from jem_robust_attacks.batch import Batch
from jem_robust_attacks.norms import distance
from jem_robust_attacks.pgd import CONFIRM_DRAWS, EOT_CAP
from tests.linear_world import NORMS, SHAPE, Spy, assert_valid, noisy, world


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("eps", [0, 0.01, 0.3])
def test_queries_count_draws(random: bool, known: bool, eps: float) -> None:
    linear, images, labels, _ = world()
    spy = Spy(noisy(1.0)[0] if random else linear, (not random) if known else None)
    seen: list[int] = []
    result = PGD(steps=4, restarts=2)(spy, images, labels, eps, progress=seen.append)
    assert int(result.queries.sum()) == spy.rows
    assert sum(seen) == spy.rows - (0 if known else 8)  # probing comes before anything is reported


def test_active_set_spends_less() -> None:
    linear, images, labels, _ = world()
    spent = PGD(steps=30)(linear, images, labels, 0.3).queries
    assert spent.max() < 20


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("norm", NORMS)
def test_batches_order_and_subsets_change_nothing(random: bool, norm: str) -> None:
    class Keyed:
        """Noise that depends on the ids alone, as the protocol asks."""

        bounds, deterministic = (0.0, 1.0), not random

        def draw(self, x: Tensor, ids: Tensor, draws: Tensor, purpose: str, seed: int) -> Tensor:
            key = [
                np.random.default_rng([seed, int(i), int(d)]).standard_normal(16)
                for i, d in zip(ids, draws, strict=True)
            ]
            noise = torch.from_numpy(np.stack(key)).view_as(x)
            return linear(x + 0.5 * random * noise * x)

    linear, images, labels, _ = world()
    attack = PGD(norm, steps=4, restarts=2)
    whole = attack(Keyed(), images, labels, 0.05, seed=7)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    for size in (1, 7, 40):
        for part in order.split(size)[:6]:
            some = attack(Keyed(), images[part], labels[part], 0.05, seed=7, image_ids=part)
            torch.testing.assert_close(some.adversarials, whole.adversarials[part], atol=1e-12, rtol=0)
            torch.testing.assert_close(some.candidates, whole.candidates[part], atol=1e-12, rtol=0)  # type: ignore[index]
            assert torch.equal(some.success, whole.success[part])
            assert torch.equal(some.queries, whole.queries[part])


def test_starts_serve_restart_one() -> None:
    linear, images, labels, _ = world()
    starts = (images + 0.3).clamp(0, 1)
    spy = Spy(lambda x: 0 * linear(x), deterministic=True)  # no gradient: iterates stay where they start
    candidates, _ = PGD(steps=1, keep=0, restarts=2, targets=0).search(spy, images, labels, 0.05, starts=starts)
    torch.testing.assert_close(candidates[:, 0], images + 0.05)
    assert not torch.allclose(candidates[:, 1], images + 0.05)
    assert candidates.shape == (40, 2, *SHAPE)
    with pytest.raises(ValueError, match="starts of the images' shape"):
        PGD().search(linear, images, labels, 0.05, starts=starts[:3])
    with pytest.raises(ValueError, match="expected finite starts"):
        PGD().search(linear, images, labels, 0.05, starts=starts * torch.nan)


def test_restarts_find_what_one_start_misses() -> None:
    def valley(x: Tensor) -> Tensor:  # flat at the image; wrong on one side only, which a random start sees
        return torch.stack([torch.zeros(len(x)), torch.relu(x[:, 0, 0, 0] - 0.5) * 10 - 0.5], 1)

    images, labels = torch.full((8, 1, 2, 2), 0.5), torch.zeros(8, dtype=torch.int64)
    assert not PGD(steps=10)(valley, images, labels, 0.1).success.any()
    assert PGD(steps=10, restarts=20)(valley, images, labels, 0.1).success.all()


def test_random_starts_belong_to_image_ids() -> None:
    _, images, labels, _ = world()
    flat = Spy(lambda x: 0 * x.flatten(1)[:, :2], deterministic=True)

    def run(ids: list[int]) -> Tensor:
        attack = PGD(steps=1, keep=0, restarts=2)
        return attack.search(flat, images[:1].repeat(3, 1, 1, 1), labels[:3], 0.1, image_ids=ids)[0][:, 1]

    first, second = run([5, 6, 2**40]), run([2**40, 5, 6])
    assert torch.equal(first, second[[1, 2, 0]])
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize(("scale", "expected"), [(0.0, 1), (0.05, 1), (2.0, EOT_CAP)])
def test_automatic_eot(scale: float, expected: int) -> None:
    """The noise multiplies the weights, so that the gradient itself is noisy."""
    _, images, labels, weight = world()

    def model(x: Tensor) -> Tensor:
        drawn = weight[0] * (1 + scale * torch.randn(len(x), 16)) + 3 * scale * torch.randn(len(x), 16)
        z = (x.flatten(1) * drawn).sum(1)
        return torch.stack([z, torch.zeros_like(z)], 1)

    batch = Batch.of(model, images, labels, 0)
    eot = PGD()._eot(batch, images)
    assert batch.target.deterministic is (scale == 0)
    assert eot.median() == expected
    assert eot.max() <= EOT_CAP


def test_automatic_eot_of_no_gradient_stays_at_one() -> None:
    _, images, labels, _ = world()
    model = lambda x: torch.randn(len(x), 2, dtype=torch.float64) + 0 * x.flatten(1)[:, :2]  # noqa: E731
    assert PGD()._eot(Batch.of(model, images, labels, 0), images).eq(1).all()


def test_none_and_one_image() -> None:
    linear, images, labels, _ = world()

    def never(x: Tensor) -> Tensor:
        raise AssertionError("nothing to call the model with")

    empty = PGD()(never, images[:0], labels[:0], 0.1)
    assert empty.adversarials.shape == (0, *SHAPE)
    assert [len(v) for v in (empty.success, empty.distances, empty.queries)] == [0, 0, 0]
    assert PGD()(never, images[:0].numpy(), [], 0).success.shape == (0,)
    one = PGD()(linear, images[:1], labels[:1], 0.3)
    assert one.success.tolist() == [True]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("eps", [1e-6, 0.004, 0.3])
def test_every_dtype_stays_within_ball_and_box(dtype: torch.dtype, norm: str, eps: float) -> None:
    linear, images, labels, _ = world()
    images = (images * 2.5 - 0.75).clamp(0, 1).to(dtype)
    seen = set()

    def model(x: Tensor) -> Tensor:
        seen.add(x.dtype)
        return linear(x)

    result = PGD(norm, steps=20, restarts=2)(model, images, labels, eps)
    assert_valid(result, images, norm, eps)
    assert seen == {dtype}
    for m in range(result.candidates.shape[1]):  # type: ignore[union-attr]
        far = distance(result.candidates[:, m], images, norm)  # type: ignore[index]
        assert far.max() <= eps + 1e-6


def test_small_steps_move_float16_images() -> None:
    linear, images, labels, _ = world()
    result = PGD(steps=100)(linear, images.half(), labels, 0.02)
    exact = PGD(steps=100)(linear, images.half().double(), labels, 0.02)
    assert 5 < exact.success.sum() < 40
    assert torch.equal(result.success, exact.success)


def test_nothing_is_touched() -> None:
    network = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 2)).double().train()
    _, images, labels, _ = world()
    images = images.requires_grad_()
    saved, buffers = images.detach().clone(), {k: v.clone() for k, v in network.state_dict().items()}
    state = torch.get_rng_state()
    result = PGD(steps=3, restarts=2)(network, images, labels, 0.1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(images.detach(), saved)
    assert images.requires_grad
    assert images.grad is None
    assert all(p.grad is None and p.requires_grad for p in network.parameters())
    assert all(torch.equal(v, buffers[k]) for k, v in network.state_dict().items())
    assert all(m.training for m in network.modules())
    assert not result.adversarials.requires_grad


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_under_any_grad_mode(context: Any) -> None:
    linear, images, labels, _ = world()
    expected = PGD(steps=3, restarts=2)(linear, images, labels, 0.1)
    with context():
        inside = PGD(steps=3, restarts=2)(linear, images.clone(), labels.clone(), 0.1, starts=images.clone())
    assert torch.equal(inside.adversarials, expected.adversarials)
    assert not inside.adversarials.is_inference()


def test_same_seed_same_result_whatever_the_global_rng() -> None:
    model, images, labels = noisy(1.0)
    attack = PGD(steps=4, restarts=2)
    first = attack(model, images, labels, 0.05, seed=3)
    with torch.random.fork_rng():
        torch.manual_seed(1234)
        second = attack(model, images, labels, 0.05, seed=3)
    assert torch.equal(first.adversarials, second.adversarials)
    assert torch.equal(first.queries, second.queries)
    assert not torch.equal(first.candidates, attack(model, images, labels, 0.05, seed=4).candidates)  # type: ignore[arg-type]


def test_numpy_lists_and_layouts() -> None:
    linear, images, labels, _ = world()
    expected = PGD(steps=3)(linear, images, labels, 0.1)
    array = images.numpy()[::-1][::-1]  # a view, negative strides on the way
    array.flags.writeable = False
    for x in (array, images.tolist(), images.to(memory_format=torch.channels_last)):
        given = torch.eye(2)[labels] if x is array else labels.tolist()
        result = PGD(steps=3)(linear, torch.tensor(x, dtype=torch.float64) if isinstance(x, list) else x, given, 0.1)
        torch.testing.assert_close(result.adversarials, expected.adversarials)


def test_noise_in_the_forward_does_not_break_confirmation() -> None:
    model, images, labels = noisy(0.5)
    result = PGD(steps=5)(model, images, labels, 0.3)
    assert result.success.all()
    assert (result.queries >= 2 * CONFIRM_DRAWS).all()


@pytest.mark.parametrize(
    "settings",
    [
        {"norm": "l1"}, {"norm": "l0"}, {"steps": 0}, {"steps": -1}, {"steps": 2.5}, {"steps": "ten"}, {"steps": True},
        {"restarts": 0}, {"keep": -1}, {"eot": 0}, {"eot": "often"}, {"eot": 1.5}, {"eot": True}, {"loss": "mse"},
        {"step_size": 0}, {"step_size": -1}, {"step_size": float("nan")}, {"step_size": float("inf")},
        {"step_size": "x"},
    ],
)  # fmt: skip
def test_bad_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        PGD(**settings)


@pytest.mark.parametrize("eps", [None, "nan", -1, "8/0", "eight", float("inf")])
def test_bad_epsilons_come_before_any_computing(eps: Any) -> None:
    _, images, labels, _ = world()
    with pytest.raises(ValueError, match="expected"):
        PGD()(lambda x: 1 / 0, images, labels, eps)


def test_bad_labels() -> None:
    linear, images, labels, _ = world()
    with pytest.raises(ValueError, match="expected labels from 0 to 1, got 5"):
        PGD()(linear, images, labels + 4, 0.1)
    with pytest.raises(ValueError, match="expected labels from 0 up, got -1"):
        PGD()(linear, images, -labels, 0.1)


def test_settings_are_canonical() -> None:
    assert PGD(norm=2).norm == "l2"  # type: ignore[arg-type]
    assert PGD("Linf", steps=np.int64(3), step_size="2/255") == PGD("inf", steps=3, step_size=2 / 255)  # type: ignore[arg-type]


def test_one_eps_an_image():
    def model(x):
        value = x.flatten(1).mean(1) - 0.5
        return torch.stack([-value, value], 1)

    images, labels = torch.tensor([0.53, 0.53, 0.53]).view(3, 1, 1, 1).double(), [1, 1, 1]
    eps = torch.tensor([0.0, 0.02, 0.05], dtype=torch.float64)
    found, _ = PGD(steps=4).search(model, images, labels, eps)
    assert torch.equal(found[0], images[:1].expand_as(found[0]))
    distances = (found - images.unsqueeze(1)).abs().flatten(2).amax(2)
    assert (distances <= eps[:, None] + 1e-9).all()
    assert PGD(steps=4)(model, images, labels, eps).success.tolist() == [False, False, True]
    for i, size in list(enumerate(eps.tolist()))[1:]:  # what others may do changes nothing
        assert torch.equal(PGD(steps=4).search(model, images[i : i + 1], [1], size)[0][0], found[i])
    with pytest.raises(ValueError, match="expected one eps or 3, one an image, got 2"):
        PGD()(model, images, labels, eps[:2])
