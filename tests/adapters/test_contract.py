"""One table over all toolkits: every attack on JEM-0, JEM-1 and JEM-10, in its own pipeline and behind our protocol."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from jem_robust import JEMClassifier, load_images, load_model
from jem_robust.adapters.toolkit_attacks import ToolkitAttack
from tests.adapters.table import TABLE, Row
from tests.adapters.world import COUNT, WRONG, assert_within, batch, jem, seed_all, untouched

for toolkit in ("art", "foolbox", "torchattacks"):
    pytest.importorskip(toolkit, reason=f"pip install jem-robust[{toolkit}]")

STEPS = pytest.mark.parametrize("steps", [0, 1, 10])
ROWS = pytest.mark.parametrize("row", TABLE, ids=str)


def pipeline(row: Row, model: JEMClassifier, images: Tensor, labels: Tensor) -> tuple[Any, list[Any]]:
    """What the toolkit makes of the images by its own interface, and what it was given."""
    if row.toolkit == "art":
        from art.attacks import evasion

        from jem_robust.adapters.art import JEMARTClassifier

        x, y = images.numpy().copy(), np.eye(4, dtype=np.float32)[labels.numpy()]
        attack = getattr(evasion, row.name)(JEMARTClassifier(model), **row.ours, **row.own)
        return attack.generate(x=x, y=y), [x, y]
    if row.toolkit == "foolbox":
        from foolbox import attacks

        from jem_robust.adapters.foolbox import to_foolbox

        attack = getattr(attacks, row.name)(**row.ours)
        return attack(to_foolbox(model), images, labels, epsilons=row.eps if row.limited else None)[1], []
    import torchattacks

    from jem_robust.adapters.torchattacks import to_torchattacks

    return getattr(torchattacks, row.name)(to_torchattacks(model), **row.ours, **row.own)(images, labels), []


@STEPS
@ROWS
def test_pipeline(row: Row, steps: int, request: pytest.FixtureRequest) -> None:
    if "run" in row.flaws and steps:
        request.applymarker(pytest.mark.xfail(reason=row.flaws["run"], raises=ValueError, strict=False))
    model = jem(steps)
    images, labels = batch(model)
    with untouched(model, images, labels, everything=False):
        found, given = pipeline(row, model, images, labels)
    assert_within(found, images, row.norm, row.eps if row.limited else None)
    for array, original in zip(given, (images.numpy(), np.eye(4)[labels.numpy()]), strict=False):
        assert np.array_equal(array, original)


@ROWS
def test_pipeline_repeats_with_its_seeds(row: Row, request: pytest.FixtureRequest) -> None:
    for flaw in ("run", "seed"):
        if flaw in row.flaws:
            request.applymarker(pytest.mark.xfail(reason=row.flaws[flaw], strict=False))
    model = jem(1)
    images, labels = batch(model)
    results = []
    for _ in range(2):
        seed_all(model)
        results.append(torch.as_tensor(pipeline(row, model, images, labels)[0]))
    assert torch.equal(*results)


def check(row: Row, model: JEMClassifier, images: Tensor, labels: Tensor) -> None:
    """The contract of our protocol; image WRONG is wrong from the start."""
    attack = ToolkitAttack(row.toolkit, row.name, row.norm, row.ours)
    with untouched(model, images, labels):
        result = attack(model, images, labels, row.eps, seed=3)
    torch.manual_seed(11)
    np.random.seed(12)
    candidates, nonfinite = attack.search(model, images, labels, row.eps, seed=3)
    assert result.candidates is not None
    assert torch.equal(candidates, result.candidates), "same seed, other result"
    assert not nonfinite.any()
    assert candidates.shape == (COUNT, 1, *images.shape[1:])
    assert candidates.dtype == images.dtype
    for found in (result.adversarials, candidates[:, 0]):
        assert_within(found, images, row.norm, row.eps)
    assert bool(result.success[WRONG])
    assert result.distances[WRONG] == 0
    assert torch.equal(result.adversarials[WRONG], images[WRONG])
    assert torch.isfinite(result.distances).equal(result.success)
    assert torch.equal(result.adversarials[~result.success], images[~result.success])
    assert bool((result.queries > 0).all())


@STEPS
@ROWS
def test_behind_our_protocol(row: Row, steps: int) -> None:
    model = jem(steps)
    check(row, model, *batch(model))


@pytest.mark.slow
@STEPS
@ROWS
def test_behind_our_protocol_on_the_embedded_model(row: Row, steps: int) -> None:
    model = load_model("jem-fashion-mnist", steps=steps)
    images, labels = load_images("fashion-mnist", limit=COUNT)
    labels[WRONG] = model.with_refinement(steps=0)(images).argmin(1)[WRONG]
    check(row, model, images, labels)
