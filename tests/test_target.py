"""Any callable as a target: seeded noise, determinism, labels and images in every accepted form."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from jem_robust_attacks.batch import Batch, class_indices
from jem_robust_attacks.target import CallableTarget, as_target

IMAGES = torch.linspace(0, 1, 6 * 4).reshape(6, 1, 2, 2).double()
IDS = torch.arange(6)
Model = Callable[[Tensor], Tensor]


def plain(x: Tensor) -> Tensor:
    return torch.stack([x.flatten(1).sum(1), -x.flatten(1).sum(1)], 1)


def noisy(x: Tensor) -> Tensor:
    return plain(x + torch.randn_like(x))


def shared(x: Tensor) -> Tensor:
    return plain(x) + torch.randn(1, 2)


def logits(target: Any, draw: int, seed: int = 0) -> Tensor:
    return target.draw(IMAGES, IDS, torch.full_like(IDS, draw), "attack", seed)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("model", "deterministic"), [(plain, True), (noisy, False), (shared, False)])
def test_determinism_is_probed(model: Model, deterministic: bool) -> None:
    target = as_target(model, IMAGES)
    assert target.deterministic is deterministic
    assert target.bounds == (0.0, 1.0)
    assert torch.equal(logits(target, 3), logits(target, 3))
    assert torch.equal(logits(target, 3), logits(target, 4)) is deterministic
    assert torch.equal(logits(target, 3), logits(target, 3, seed=1)) is deterministic


def test_global_rng_is_untouched_and_irrelevant() -> None:
    target = as_target(noisy, IMAGES)
    before = torch.get_rng_state()
    first = logits(target, 0)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(99)
    assert torch.equal(first, logits(target, 0))
    torch.set_rng_state(before)


@pytest.mark.parametrize("model", [noisy, shared])
def test_draws_in_one_call_are_independent_and_the_same_as_one_by_one(model: Model) -> None:
    target = as_target(model, IMAGES)
    together = target.draw(IMAGES.repeat(3, 1, 1, 1), IDS.repeat(3), torch.arange(3).repeat_interleave(6), "attack", 0)
    assert torch.equal(together, torch.cat([logits(target, d) for d in range(3)]))
    assert not torch.equal(together[:6], together[6:12])
    mixed = torch.arange(3).repeat(6)
    interleaved = target.draw(IMAGES.repeat_interleave(3, 0), IDS.repeat_interleave(3), mixed, "attack", 0)
    assert torch.equal(interleaved[mixed == 1], logits(target, 1))


def test_attributes_of_the_model_count() -> None:
    class Known:
        bounds = (-1, 2)
        deterministic = False

        def __call__(self, x: Tensor) -> Tensor:
            raise AssertionError("not to be called: nothing to probe")

    target = as_target(Known(), IMAGES)
    assert isinstance(target, CallableTarget)
    assert target.bounds == (-1.0, 2.0)
    assert not target.deterministic
    assert as_target(target, IMAGES) is target


def test_a_module_computes_in_eval_mode_and_keeps_its_flags() -> None:
    network = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2)).double()
    network[1].eval()
    flags = [m.training for m in network.modules()]
    statistics = {k: v.clone() for k, v in network.state_dict().items()}
    target = as_target(network, IMAGES)
    assert target.deterministic
    logits(target, 0)
    assert [m.training for m in network.modules()] == flags
    assert all(torch.equal(v, statistics[k]) for k, v in network.state_dict().items())


def test_not_callable() -> None:
    with pytest.raises(TypeError, match="expected a callable images -> logits, got str"):
        as_target("model", IMAGES)


INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


@pytest.mark.parametrize("dtype", INTEGERS)
def test_every_integer_dtype(dtype: str) -> None:
    labels = np.array([1, 0, 2], dtype)
    for form in (labels, torch.from_numpy(labels), labels[:, None], np.eye(3, dtype=dtype)[labels.astype(int)]):
        assert class_indices(form).tolist() == [1, 0, 2]
        assert class_indices(form).dtype == torch.int64


@pytest.mark.parametrize(
    "form",
    [
        [1, 0, 2],
        (1, 0, 2),
        [[1], [0], [2]],
        np.eye(3)[[1, 0, 2]],
        torch.eye(3)[[1, 0, 2]],
        torch.eye(3).bool()[[1, 0, 2]],
    ],
)
def test_other_label_forms(form: Any) -> None:
    assert class_indices(form).tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    "junk",
    [
        [0.5, 1.0],
        np.array([0.0, 1.0]),
        "ab",
        ["a", "b"],
        None,
        [None, 1],
        [True, False],
        [[0.5], [1.0]],
        [[1, 2], [3]],
        [1j, 2],
    ],
)
def test_junk_labels_of_wrong_type(junk: Any) -> None:
    with pytest.raises(TypeError, match="expected"):
        class_indices(junk)


@pytest.mark.parametrize(
    "junk", [[[0.2, 0.8], [0.5, 0.5]], [[1, 1], [0, 1]], [[0, 0], [0, 1]], [-1, 0], [0, 2**40 - 2**41]]
)
def test_junk_labels_of_wrong_value(junk: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        class_indices(junk)


@pytest.mark.parametrize(
    ("images", "labels", "ids", "error", "message"),
    [
        (IMAGES * 255, IDS, None, ValueError, r"within \[0.0, 1.0\], got \[0, 255\]"),
        (IMAGES - 1e-3, IDS, None, ValueError, "rescale"),
        (IMAGES * float("nan"), IDS, None, ValueError, "remove NaN"),
        ((IMAGES * 255).to(torch.uint8), IDS, None, TypeError, "divide by 255"),
        (IMAGES[0, 0, 0], IDS, None, ValueError, r"a batch of images \(N, \.\.\.\)"),
        ("cat.png", IDS, None, TypeError, "expected a tensor, an array"),
        (IMAGES, IDS[:3], None, ValueError, r"expected 6 labels and image ids, got \(3,\)"),
        (IMAGES, torch.zeros(6, 1, 1, dtype=torch.int64), None, ValueError, "expected 6 labels"),
        (IMAGES, IDS, IDS[:2], ValueError, r"and \(2,\)"),
        (IMAGES, IDS, [0.5] * 6, TypeError, "expected integer image ids"),
    ],
)
def test_bad_batches(images: Any, labels: Any, ids: Any, error: type[Exception], message: str) -> None:
    def never(x: Tensor) -> Tensor:
        raise AssertionError("computed before checking")

    with pytest.raises(error, match=message):
        Batch.of(never, images, labels, 0, ids)


def test_batches_copy_and_clamp() -> None:
    images = IMAGES.numpy()[:, :, ::-1].copy()[:, :, ::-1] + 1e-7  # negative strides
    batch = Batch.of(plain, images, [0] * 6, np.int64(-3), torch.arange(6))  # type: ignore[arg-type]
    assert batch.images.max() == 1
    assert batch.images.dtype == torch.float64
    assert batch.generator(0, 1).random() == Batch.of(plain, IMAGES, [0] * 6, -3).generator(0, 1).random()
    assert batch.queries.tolist() == [2, 2, 2, 2, 0, 0]  # what probing took


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda x: x.sum((1, 2, 3)), r"expected logits \(6, K\) from the model, got \(6,\)"),
        (lambda x: plain(x)[:3], r"got \(3, 2\)"),
        (lambda x: plain(x).tolist(), "got list"),
        (plain, "expected labels from 0 to 1, got 5: renumber"),
    ],
)
def test_bad_logits(model: Any, message: str) -> None:
    model.deterministic = True
    batch = Batch.of(model, IMAGES, IDS, 0)
    with pytest.raises(ValueError, match=message):
        batch.logits(batch.images, IDS, batch.fresh(1))
    del model.deterministic
