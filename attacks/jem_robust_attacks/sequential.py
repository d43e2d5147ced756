"""Whether a random classifier misclassifies an image often enough: a truncated sequential probability ratio test.

Wald (1945): few draws on clear cases. A deterministic model takes one.
"""

from collections.abc import Generator
from dataclasses import dataclass
from math import ceil, log

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Counts = NDArray[np.int64]
Flags = NDArray[np.bool_]
Places = NDArray[np.intp]

CAUTION = (0.3, 0.1, 0.0)  # how far below the fooling rate an image may be that the search takes for adversarial


@dataclass(frozen=True)
class Majority:
    """Wrong in more than half of `count` draws: for deterministic models, and where mean scores are wanted."""

    count: int = 1

    def verdicts(self, fooled: Counts, draws: Counts) -> Counts:
        """From wrong draws and all draws so far, (m,) each: 1 passed, 0 failed, -1 undecided."""
        return np.where(draws < self.count, -1, 2 * fooled > draws)


@dataclass(frozen=True)
class SequentialTest:
    """Whether an image is misclassified with probability `high` rather than `low`, from as few draws as needed.

    An image fooled with probability `low` or less passes with probability at most `alpha`; one of `high` or more fails
    with at most `beta`, apart from the rare cases that are undecided after `most` draws, which fail.
    """

    low: float
    high: float
    alpha: float
    beta: float

    @property
    def clear(self) -> int:
        """Draws it takes to pass when every one is wrong."""
        return ceil(-log(self.alpha) / log(self.high / self.low))

    @property
    def most(self) -> int:
        """Draws after which an undecided case passes with half the evidence, and fails with less."""
        return 3 * self.clear

    def verdicts(self, fooled: Counts, draws: Counts) -> Counts:
        """By the likelihood ratio of `high` to `low`."""
        ratio = fooled * log(self.high / self.low) + (draws - fooled) * log((1 - self.high) / (1 - self.low))
        passed = ratio >= -log(self.alpha) * np.where(draws >= self.most, 0.5, 1.0)
        failed = (ratio <= log(self.beta)) | (draws >= self.most)
        return np.where(passed, 1, np.where(failed, 0, -1))


def searching(rate: float, caution: int = 0) -> SequentialTest:
    """For the many images on the way: cheap, and wrong at times, the less so the more caution (0 to 2) there is."""
    return SequentialTest(rate - CAUTION[caution], 1 - (1 - rate) / 10, alpha=0.1, beta=0.2)


def confirming(rate: float) -> SequentialTest:
    """For what is reported: less than `rate` passes in one case of twenty at most, a coin flip practically never."""
    return SequentialTest(rate, 1 - (1 - rate) / 5, alpha=0.05, beta=0.05)


@dataclass(frozen=True)
class Ask:
    """Images (m, C, H, W), m > 0, to judge by a test, unless the model is deterministic: then one draw decides."""

    images: Array
    test: SequentialTest | Majority


@dataclass(frozen=True)
class Answer:
    """fooled (m,): passed the test. margins (m,): means over the draws, -inf without any; NaN counts as large."""

    fooled: Flags
    margins: Array


Search = Generator[Ask, Answer, None]
