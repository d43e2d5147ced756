"""What a newcomer broke: other-class starts and batches, small budgets on random models, images wrong already."""

import numpy as np
import pytest
import torch

import jem_robust as jr
from jem_robust_attacks import PGD, BoundaryAttack, PointwiseAttack, RayS, Square

SHAPE = (1, 6, 6)
IMAGES = torch.full((6, *SHAPE), 0.4, dtype=torch.float64)


class Random:
    """Wrong with a probability that depends on whether the image is the clean one."""

    bounds, deterministic = (0.0, 1.0), False

    def __init__(self, clean, changed):
        self.clean, self.changed = clean, changed

    def draw(self, images, image_ids, draw_ids, purpose, seed):
        touched = (images != 0.4).flatten(1).any(1).tolist()
        pairs = zip(image_ids.tolist(), draw_ids.tolist(), touched, strict=True)
        wrong = [np.random.default_rng([i, d]).random() < (self.changed if t else self.clean) for i, d, t in pairs]
        return torch.nn.functional.one_hot(torch.tensor(wrong).long(), 2).double()


@pytest.mark.parametrize("attack", [BoundaryAttack, PointwiseAttack, RayS])
@pytest.mark.parametrize("queries", [100, 300])
def test_a_small_budget_goes_into_a_first_find(attack, queries):
    result = attack(max_queries=queries)(Random(0.0, 1.0), IMAGES, [0] * 6)
    assert result.success.all()
    assert (result.queries <= queries).all()


@pytest.mark.parametrize(
    "attack", [kind(max_queries=200) for kind in (BoundaryAttack, PointwiseAttack, RayS, Square)], ids=repr
)
def test_images_that_are_nearly_always_wrong_are_left_alone(attack):
    images = torch.full((40, *SHAPE), 0.4, dtype=torch.float64)
    for rate, least in ((0.97, 27), (0.99, 38)):  # the test's power: .8 and .99
        result = attack(Random(rate, rate), images, [0] * 40, eps=None if attack.minimizes else 0.1)
        assert int((result.distances == 0).sum()) >= least
    unsure = attack(Random(0.8, 0.8), images, [0] * 40, eps=None if attack.minimizes else 0.1)
    assert int(unsure.success.sum()) <= 2


@pytest.mark.parametrize("attack", [BoundaryAttack(max_queries=200), PointwiseAttack(max_queries=200)], ids=repr)
def test_starts_of_other_classes_come_from_all_images_whatever_the_batch(attack):
    """Class 1 is smooth and bright: no noise gets there, another image does."""

    def smooth(x):
        rough = (x - x.mean((2, 3), keepdim=True)).abs().amax((1, 2, 3)) > 0.05
        value = torch.where(rough, -1.0, x.mean((1, 2, 3)) - 0.6)
        return torch.stack([-value, value], 1)

    x = torch.tensor([0.3, 0.35, 0.4, 0.8]).view(4, 1, 1, 1).expand(4, *SHAPE).contiguous()
    curves = [
        jr.evaluate(smooth, x, [0, 0, 0, 1], "l2" if attack.norm != "l0" else "l0", [0, 5, 36], [attack], batch_size=b)
        for b in (1, 2, 4)
    ]
    for curve in curves[1:]:
        assert np.array_equal(curve.raw, curves[0].raw)
    assert curves[0].raw[-1] < 1


@pytest.mark.parametrize("attack", [BoundaryAttack(max_queries=1), RayS(max_queries=1), PointwiseAttack(max_queries=1)])
def test_probing_keeps_to_the_budget(attack):
    rows = []

    def plain(x):
        rows.append(len(x))
        return torch.stack([x.flatten(1).sum(1) * 0 + 1, x.flatten(1).sum(1) * 0], 1)

    result = attack(plain, IMAGES, [0] * 6)
    assert sum(rows) <= 6
    assert (result.queries <= 1).all()
    assert not result.success.any()


def test_starts_are_checked_like_images():
    model = Random(0.0, 1.0)
    with pytest.raises(ValueError, match=r"within \[0.0, 1.0\], got \[7"):
        BoundaryAttack(max_queries=5)(model, IMAGES, [0] * 6, starts=torch.full_like(IMAGES, 7.0))
    with pytest.raises(TypeError, match="divide by 255"):
        BoundaryAttack(max_queries=5)(model, IMAGES, [0] * 6, starts=torch.ones(IMAGES.shape, dtype=torch.int32))
    with pytest.raises(ValueError, match="within"):
        PGD(steps=1)(lambda x: x.flatten(1)[:, :2], IMAGES, [0] * 6, eps=0.1, starts=IMAGES * 255)


def test_norms_and_sizes_that_make_no_sense_say_what_does():
    with pytest.raises(ValueError, match="pixels"):
        jr.evaluate(lambda x: x.flatten(1), IMAGES, [0] * 6, "l0", ["8/255"], ["pointwise"])
    with pytest.raises(ValueError, match=r"rays has.*'l2'.*pgd or boundary"):
        jr.evaluate(lambda x: x.flatten(1), IMAGES, [0] * 6, "l2", [1.0], ["pgd", "rays"])
    with pytest.raises(ValueError, match=r"pgd has.*'l0'.*pointwise"):
        jr.evaluate(lambda x: x.flatten(1), IMAGES, [0] * 6, "l0", [3])
