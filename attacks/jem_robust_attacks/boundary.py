"""Boundary attack (Brendel, Rauber & Bethge 2018): a walk along the decision boundary towards the image; labels only.

Beyond the paper: steps are drawn in three resolutions, the ones that succeed more often (networks give way to coarse
changes), and every so often the walk jumps along the mean of the directions that succeeded, weighed against those that
did not, which is an estimate of the boundary's normal.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jem_robust_attacks.search import Subject
from jem_robust_attacks.sequential import Answer, Array, Ask, Search
from jem_robust_attacks.starts import SIDES, DecisionAttack, blocks, enlarged, start

HITS = 0.25, 0.5  # wanted shares of success: of whole steps, and of their orthogonal part alone
RATES = 0.1, 0.3  # how quickly the step sizes follow
CHECK = 10  # every so many steps the orthogonal part is asked about by itself
EXPLORE = 0.15  # share of the stretches whose resolution is not the best so far, but any
JUMP = 100  # steps between jumps
JUMP_QUERIES = 6
NOWHERE = 1e-12  # distances below this are rounding


@dataclass(frozen=True)
class BoundaryAttack(DecisionAttack):
    """Minimises the distance; norm "l2" or "linf". One query a step.

    delta, epsilon: first sizes of the steps along the sphere around the image and towards the image, as shares of the
    distance; both follow each image's own success.
    """

    norm: str = "l2"
    delta: float = 0.1
    epsilon: float = 0.05
    norms: ClassVar[tuple[str, ...]] = ("l2", "linf")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("delta", "epsilon"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"expected {name} in (0, 1), got {getattr(self, name)!r}: a share of the distance")

    def _walk(self, subject: Subject) -> Search:
        x = yield from start(subject)
        if not subject.found:
            return
        delta, epsilon = np.full(len(SIDES), self.delta), np.full(len(SIDES), self.epsilon)
        reach, gains = np.full(len(SIDES), 0.3), np.full(len(SIDES), np.inf)
        while True:
            explore = subject.rng.random() < EXPLORE
            kind = int(subject.rng.integers(len(SIDES)) if explore else gains.argmax())
            before, spent = subject.distance(x), subject.spent
            rate, mean = HITS[0], np.zeros_like(x)
            for step in range(JUMP):
                direction = _direction(subject, SIDES[kind])
                sideways = self._moved(x, subject, direction, delta[kind], 1.0)
                whole = self._moved(x, subject, direction, delta[kind], 1 - epsilon[kind])
                check = step % CHECK == 0
                answer = yield subject.ask(np.stack([whole, sideways][: 1 + check]))
                hit = bool(answer.fooled[0])
                mean += (hit - rate) / delta[kind] * (sideways - x)
                rate += 0.02 * (hit - rate)
                epsilon[kind] = min(epsilon[kind] * np.exp(RATES[0] * (hit - HITS[0])), 0.5)
                if check:
                    delta[kind] = min(delta[kind] * np.exp(RATES[1] * (answer.fooled[1] - HITS[1])), 1.0)
                if hit:
                    x = yield from subject.settle(whole)
            x, reach[kind] = yield from self._jump(x, subject, mean, reach[kind])
            gain = np.log(before / max(subject.distance(x), NOWHERE)) / (subject.spent - spent)
            gains[kind] = gain if np.isinf(gains[kind]) else (gains[kind] + gain) / 2

    def _moved(self, x: Array, subject: Subject, direction: Array, length: float, scale: float) -> Array:
        """x moved across the line to the image, then to `scale` of its distance.

        l2: by `length` of the distance along the direction. linf, where spheres are cubes: that share of the pixels,
        those of the largest directions, goes to the cube's side.
        """
        offset, far = x - subject.image, subject.distance(x)
        if far < NOWHERE:  # an image on the boundary itself leaves no line to move across
            return x
        if self.norm == "l2":
            direction = direction - offset * (np.vdot(offset, direction) / far**2)
            direction *= length * far / max(float(np.linalg.norm(direction)), 1e-300)
            offset = (offset + direction) / (1 + length**2) ** 0.5
        else:
            size = np.abs(direction)
            moved = max(1, round(length * size.size))
            least = np.partition(size, size.size - moved, axis=None)[size.size - moved]
            offset = np.where(size >= least, far * np.sign(direction), offset)
        return np.clip(subject.image + scale * offset, *subject.bounds)

    def _jump(
        self, x: Array, subject: Subject, along: Array, reach: float
    ) -> Generator[Ask, Answer, tuple[Array, float]]:
        """As far along as the model stays fooled on a path where going on always means coming closer."""
        low, high, best = 0.0, 0.0, None
        for _ in range(JUMP_QUERIES):
            scale = (1 + reach**2) ** -0.5 if self.norm == "l2" else 1 - 0.2 * reach
            there = self._moved(x, subject, along, reach, scale)
            answer = yield subject.ask(there[None])
            if answer.fooled[0]:
                low, best = reach, there
            else:
                high = reach
            if low and high and high < 1.3 * low:
                break
            top = 5.0 if self.norm == "l2" else 1.0
            reach = (low + high) / 2 if low and high else min(2 * low, top) if low else high / 2
        if best is None:
            return x, high
        x = yield from subject.settle(best)
        return x, low


def _direction(subject: Subject, side: int) -> Array:
    shape = subject.image.shape
    return enlarged(subject.rng.standard_normal(blocks(shape, side)), shape, side)
