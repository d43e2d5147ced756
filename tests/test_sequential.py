"""Sequential tests against their exact error rates, and what decisions cost."""

from typing import Any

import numpy as np
import pytest
import torch

from jem_robust_attacks import RayS
from jem_robust_attacks.batch import Batch
from jem_robust_attacks.search import run
from jem_robust_attacks.sequential import Ask, Search, SequentialTest, confirming, searching
from tests.linear_world import Spy


def passing(test: SequentialTest, p: float) -> tuple[float, float]:
    """Probability of passing and the mean number of draws, by following every path."""
    states, passed, mean = {0: 1.0}, 0.0, 0.0
    for draws in range(1, test.most + 1):
        following: dict[int, float] = {}
        for fooled, weight in states.items():
            mean += weight
            for hit, chance in ((1, p), (0, 1 - p)):
                verdict = int(test.verdicts(np.array([fooled + hit]), np.array([draws]))[0])
                passed += weight * chance * (verdict == 1)
                if verdict < 0:
                    following[fooled + hit] = following.get(fooled + hit, 0.0) + weight * chance
        states = following
    assert not states
    return passed, mean


@pytest.mark.parametrize("rate", [0.5, 0.75, 0.9, 0.97])
@pytest.mark.parametrize("make", [confirming, searching])
def test_error_rates(make: Any, rate: float) -> None:
    test = make(rate)
    assert passing(test, test.low)[0] <= test.alpha
    assert passing(test, test.high)[0] >= 1 - 1.5 * test.beta
    assert passing(test, 0.0)[0] == 0.0
    assert passing(test, 0.0)[1] <= 2.0
    assert passing(test, 1.0) == (1.0, test.clear)


def test_default_rates() -> None:
    """What the documentation states for a fooling rate of .9."""
    assert passing(confirming(0.9), 0.5)[0] < 1e-8
    assert passing(confirming(0.9), 0.9)[0] < 0.05
    assert passing(confirming(0.9), 0.85)[0] < 0.005
    assert passing(confirming(0.9), 0.97)[0] > 0.75
    assert passing(confirming(0.9), 0.99)[0] > 0.99
    assert confirming(0.9).clear <= 36
    assert searching(0.9).clear <= 5
    assert passing(searching(0.9), 0.5)[0] < 0.05
    assert passing(searching(0.9), 0.1)[1] < 1.2


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_draws_of_clear_cases(share: float) -> None:
    """One an image on a deterministic model, at most two to fail on a random one, `clear` to pass."""
    x, test = torch.full((1, 1, 6, 6), 0.5, dtype=torch.float64), confirming(0.9)
    bits = torch.tensor([1 - share, share], dtype=torch.float64)

    def ask() -> Search:
        answer = yield Ask(np.repeat(x.numpy(), 3, 0), test)
        assert answer.fooled.tolist() == [share == 1.0] * 3

    for deterministic in (True, False):
        spy = Spy(lambda z: bits.expand(len(z), 2), deterministic)
        batch = Batch.of(spy, x, [0], seed=0)
        subject = RayS()._subjects(batch, None, None)[0]
        run(batch, [subject], [ask()])
        assert (
            spy.rows == subject.spent == int(batch.queries) == 3 * (1 if deterministic else test.clear if share else 2)
        )
