"""One contract table over all attacks that decide by sequential tests."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from jem_robust_attacks import BoundaryAttack, PointwiseAttack, RayS, Square
from jem_robust_attacks.norms import distance
from jem_robust_attacks.target import PROBE_DRAWS
from tests.linear_world import Spy, assert_valid

SHAPE = (1, 6, 6)
CONTRACT: dict[str, tuple[Any, float | None]] = {
    "boundary-l2": (BoundaryAttack(max_queries=300), None),
    "boundary-linf": (BoundaryAttack("linf", max_queries=300), None),
    "pointwise-l0": (PointwiseAttack(max_queries=300), None),
    "pointwise-l2": (PointwiseAttack("l2", max_queries=300, granularity="channel"), None),
    "pointwise-linf": (PointwiseAttack("linf", max_queries=300), None),
    "rays": (RayS(max_queries=300), None),
    "square-linf": (Square(max_queries=300), 0.2),
    "square-l2": (Square("l2", max_queries=300), 0.8),
}
every_attack = pytest.mark.parametrize(("attack", "eps"), CONTRACT.values(), ids=CONTRACT)


class Linear:
    """Row by row, so that not even the last bit of a row depends on its neighbours. Random with scale > 0."""

    bounds = (0.0, 1.0)

    def __init__(self, scale: float = 0.0, shape: tuple[int, ...] = SHAPE) -> None:
        self.weight = torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        self.scale, self.deterministic = scale, scale == 0

    def gap(self, x: Tensor) -> Tensor:
        return torch.stack([((row - 0.5) * self.weight).sum() for row in x.double()]) if len(x) else x.new_zeros(0)

    def draw(self, x: Tensor, ids: Tensor, draws: Tensor, purpose: str, seed: int) -> Tensor:
        keys = torch.stack([ids, draws], 1).tolist()
        noise = [np.random.default_rng([seed, *purpose.encode(), *key]).standard_normal() for key in keys]
        z = self.gap(x) + self.scale * torch.tensor(noise, dtype=torch.float64)
        return torch.stack([-z, z], 1)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.stack([-self.gap(x), self.gap(x)], 1)


def images(n: int = 5, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return 0.35 + 0.3 * torch.rand(n, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def labels_of(x: Tensor) -> Tensor:
    return Linear(shape=tuple(x.shape[1:]))(x).argmax(1)


@every_attack
def test_a_model_that_ignores_its_input_is_never_fooled(attack: Any, eps: float | None) -> None:
    x = images()
    result = attack(lambda x: torch.eye(3)[torch.zeros(len(x), dtype=torch.int64)], x, [0] * len(x), eps)
    assert not result.success.any()
    assert result.distances.isinf().all()
    assert torch.equal(result.adversarials, x)
    assert result.queries.max() <= attack.max_queries


@every_attack
def test_a_coin_flip_is_never_fooled(attack: Any, eps: float | None) -> None:
    x = images(20)
    result = attack(lambda x: torch.randn(len(x), 2), x, [0, 1] * 10, eps, seed=3)
    assert not result.success.any()
    assert torch.equal(result.adversarials, x)
    assert result.queries.max() <= attack.max_queries


@every_attack
def test_wrong_from_the_start_is_left_alone(attack: Any, eps: float | None) -> None:
    x = images()
    spy = Spy(Linear(), deterministic=True)
    result = attack(spy, x, 1 - labels_of(x), eps)
    assert result.success.all()
    assert torch.equal(result.adversarials, x)
    assert torch.equal(result.distances, torch.zeros(len(x), dtype=torch.float64))
    assert result.queries.tolist() == [1] * len(x)
    assert spy.rows == len(x)


@every_attack
def test_valid_and_one_draw_a_decision(attack: Any, eps: float | None) -> None:
    """Whatever is reported fools; the model saw as many rows as were counted; all images in one call a round."""
    x, model = images(), Linear()
    spy = Spy(model, deterministic=True)
    seen: list[int] = []
    result = attack(spy, x, labels_of(x), eps, progress=seen.append)
    assert result.success.any()
    assert_valid(result, x, attack.norm, torch.inf if eps is None else eps)
    assert (model(result.adversarials).argmax(1) != labels_of(x))[result.success].all()
    assert spy.rows == int(result.queries.sum()) == sum(seen)
    assert spy.calls == len(seen) <= attack.max_queries
    assert result.queries.max() <= attack.max_queries
    assert result.candidates.shape[:1] + result.candidates.shape[2:] == x.shape
    assert torch.equal(result.candidates[result.success, 0], result.adversarials[result.success])
    assert not result.nonfinite.any()


@every_attack
@pytest.mark.parametrize("most", [1, 2, 3, 40, 150])
def test_max_queries_is_hard(attack: Any, eps: float | None, most: int) -> None:
    x = images()
    limited = replace(attack, max_queries=most)
    for model in (Spy(Linear()), Linear(scale=0.3)):  # one of which has to be probed
        result = limited(model, x, labels_of(x), eps)
        assert result.queries.max() <= max(most, PROBE_DRAWS)
        assert_valid(result, x, attack.norm, torch.inf if eps is None else eps)


@every_attack
@pytest.mark.parametrize("scale", [0.0, 0.05])
def test_keyed_by_image_id(attack: Any, eps: float | None, scale: float) -> None:
    """Order, subsets and batch sizes change nothing."""
    x, model = images(), Linear(scale)
    whole = attack(model, x, labels_of(x), eps, seed=7)
    order = torch.tensor([3, 0, 4])
    part = attack(model, x[order], labels_of(x)[order], eps, seed=7, image_ids=order)
    for name in ("adversarials", "distances", "success", "queries", "candidates"):
        assert torch.equal(getattr(whole, name)[order], getattr(part, name)), name
    other = attack(model, x, labels_of(x), eps, seed=8)
    assert isinstance(attack, RayS) or not torch.equal(other.adversarials, whole.adversarials)


@every_attack
def test_nothing_else_changes(attack: Any, eps: float | None) -> None:
    x = images(3).requires_grad_()
    labels, state = labels_of(x.detach()), torch.get_rng_state()
    numpy_state = np.random.get_state()[1].copy()
    kept, kept_labels = x.detach().clone(), labels.clone()
    attack(Linear(0.1), x, labels, eps)
    assert torch.equal(x, kept)
    assert torch.equal(labels, kept_labels)
    assert x.requires_grad
    assert x.grad is None
    assert torch.equal(torch.get_rng_state(), state)
    assert (np.random.get_state()[1] == numpy_state).all()


@every_attack
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_dtype_is_kept(attack: Any, eps: float | None, dtype: torch.dtype) -> None:
    x = images(2).to(dtype)
    with torch.inference_mode():
        result = attack(Linear(), x, labels_of(x), eps)
    assert result.adversarials.dtype == result.candidates.dtype == dtype
    far = distance(result.adversarials, x, attack.norm)
    assert torch.equal(torch.where(result.success, far, torch.inf), result.distances)
    assert eps is None or far.max() <= eps + 1e-6


@every_attack
@pytest.mark.parametrize("n", [0, 1])
def test_few_images(attack: Any, eps: float | None, n: int) -> None:
    x = images(n)
    result = attack(Linear(), x, labels_of(x) if n else [], eps)
    assert result.adversarials.shape == x.shape
    assert len(result.distances) == len(result.success) == len(result.queries) == n
    candidates, nonfinite = attack.search(Linear(), x, labels_of(x) if n else [], eps)
    assert candidates.shape[0] == len(nonfinite) == n
    assert candidates.shape[2:] == x.shape[1:]


@every_attack
def test_nan_counts_as_wrong(attack: Any, eps: float | None) -> None:
    x = images(3)
    result = attack(lambda x: torch.full((len(x), 2), torch.nan), x, [0, 1, 0], eps)
    assert result.success.all()
    assert result.nonfinite.all()
    assert torch.equal(result.adversarials, x)

    def fragile(z: Tensor) -> Tensor:
        far = (z - 0.5).abs().flatten(1).amax(1) > 0.16
        return torch.stack([torch.ones(len(z)), torch.where(far, torch.nan, 0.0)], 1)

    result = attack(fragile, x, [0, 0, 0], eps)
    assert result.success.all()
    assert result.nonfinite.all()
    assert (result.distances > 0).all()


@every_attack
def test_reported_images_keep_fooling_a_random_model(attack: Any, eps: float | None) -> None:
    x, model = images(8), Linear(scale=0.2)
    result = replace(attack, max_queries=600)(model, x, labels_of(x), eps, seed=1)
    assert result.success.sum() >= 3
    won = result.success.nonzero().squeeze(1)
    ids = won.repeat_interleave(50)
    fresh = torch.arange(50).repeat(len(won))
    logits = model.draw(result.adversarials[ids], ids, fresh, "judge", 1)
    assert (logits.argmax(1) != labels_of(x)[ids]).double().mean() >= 0.9


@pytest.mark.parametrize("attack", [a for a, eps in CONTRACT.values() if eps is None])
def test_eps_limits_what_counts_as_success(attack: Any) -> None:
    x = images()
    free = attack(Linear(), x, labels_of(x))
    middle = float(free.distances.median())
    held = attack(Linear(), x, labels_of(x), eps=middle)
    assert torch.equal(held.success, free.distances <= middle)
    assert torch.equal(held.adversarials[~held.success], x[~held.success])
    assert attack.minimizes
    assert attack.search(Linear(), x, labels_of(x), None)[0].shape[1] > 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BoundaryAttack("l0"), "norm"),
        (lambda: BoundaryAttack(delta=0), "delta"),
        (lambda: BoundaryAttack(epsilon=1.5), "epsilon"),
        (lambda: PointwiseAttack(granularity="row"), "granularity"),
        (lambda: RayS("l2"), "norm"),
        (lambda: RayS(max_queries=0), "max_queries"),
        (lambda: RayS(max_queries=True), "max_queries"),
        (lambda: RayS(fooling_rate=1.0), "fooling_rate"),
        (lambda: Square(p=0), "expected p"),
        (lambda: Square(eot=0), "eot"),
        (lambda: Square()(Linear(), images(1), [0]), "eps"),
        (lambda: RayS()(lambda x: x, torch.rand(2, 4), [0, 1]), "N, C, H, W"),
    ],
)
def test_bad_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_names_of_norms() -> None:
    assert BoundaryAttack("Linf").norm == "linf"
    assert PointwiseAttack("L2").norm == "l2"
    assert (BoundaryAttack().norm, PointwiseAttack().norm, RayS().norm) == ("l2", "l0", "linf")
    assert not Square.minimizes
