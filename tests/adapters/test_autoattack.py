"""AutoAttack `rand` through each backend, and its global side effects."""

import importlib
import sys
from typing import Any

import pytest
import torch

from jem_robust.adapters.autoattack import BACKENDS, auto_attack, find_backend
from tests.adapters.world import EPS, WRONG, assert_within, batch, jem, untouched


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "autoattack"])
@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("steps", [0, 1])
def test_rand(backend: str, norm: str, steps: int) -> None:
    pytest.importorskip(backend, reason="pip install pyautoattack, or --no-deps torchattacks==3.5.1")
    model = jem(steps)
    images, labels = batch(model)
    trace = sys.gettrace()
    arguments: dict[str, Any] = {"iterations": 4, "eot": 2, "backend": backend}
    with untouched(model, images, labels):
        result = auto_attack(model, images, labels, EPS[norm], norm, **arguments)
    assert sys.gettrace() is trace
    if backend == "pyautoattack":
        assert not any(importlib.import_module("pyautoattack.checks").funcs.values())
    assert_within(result.adversarials, images, norm, EPS[norm])
    assert bool(result.success[WRONG])
    assert result.distances[WRONG] == 0
    again = auto_attack(model, images, labels, EPS[norm], norm, **arguments)
    assert torch.equal(again.candidates, result.candidates)
    assert bool((result.queries > 2 * 4).all())


def test_backends_are_named() -> None:
    with pytest.raises(ValueError, match="expected backend out of"):
        find_backend("foolbox")


def test_without_a_backend_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in BACKENDS:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install pyautoattack, or pip install jem-robust\[torchattacks\]"):
        find_backend()
