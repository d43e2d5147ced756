"""RayS (Chen & Gu 2020): the shortest ray x + r * d, d of signs, that leaves the class; labels only, Linf.

Flipping the signs of ever smaller blocks shortens the ray. Where the paper flips pieces of the flattened image and
bisects the radius anew each time, blocks here are near-square, and one query asks whether a flip makes the ray shorter
by a share that is worth it; only then is the radius looked for, in growing steps.
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from jem_robust_attacks.search import Subject
from jem_robust_attacks.sequential import Answer, Array, Ask, Places, Search
from jem_robust_attacks.starts import LEVELS, DecisionAttack, blocks, enlarged, shortened

WORTH = 0.25  # of what the average block of a level contributes: least gain for which signs are flipped
MOST = 0.05  # largest gain asked for
PATTERNS = 6  # sign patterns tried whatever they give, and as many again until one serves
COARSE = 7  # pixels: side of the blocks of random ones


@dataclass(frozen=True)
class RayS(DecisionAttack):
    """Minimises the Linf distance."""

    norm: str = "linf"
    norms: ClassVar[tuple[str, ...]] = ("linf",)

    def _walk(self, subject: Subject) -> Search:
        direction, radius = yield from _first(subject)
        places = _nested(np.arange(subject.image.size).reshape(subject.image.shape))
        level = 0
        while subject.found:
            pieces = np.array_split(places, min(2**level, len(places)))
            for piece in pieces:
                trial = direction.copy()
                trial.flat[piece] *= -1
                gain = min(MOST, WORTH / len(pieces))
                shorter = yield from shortened(subject, partial(_at, subject, trial), radius, gain)
                if shorter < radius:
                    direction = trial
                    x = yield from subject.settle(_at(subject, direction, shorter))
                    radius = subject.distance(x)
                    moved = np.sign(x - subject.image)  # differs from the trial if the walk was set back
                    direction = np.where(moved == 0, direction, moved)
            level += 1
            if len(pieces) == len(places):
                level, places = 0, _nested(np.arange(len(places)).reshape(subject.image.shape), subject.rng)


def _at(subject: Subject, direction: Array, radius: float) -> Array:
    return np.clip(subject.image + radius * direction, *subject.bounds)


def _first(subject: Subject) -> Generator[Ask, Answer, tuple[Array, float]]:
    """The best of some sign patterns, after bisection."""
    shares = np.array(LEVELS) * (subject.bounds[1] - subject.bounds[0])
    best, radius = np.ones_like(subject.image), np.inf
    for t, direction in enumerate(_patterns(subject)):
        if t >= PATTERNS and subject.found:
            break
        radii = shares[shares < radius] if shares[0] < radius else np.array([0.9 * radius])
        answer = yield subject.ask(np.stack([_at(subject, direction, r) for r in radii]))
        if not answer.fooled.any():
            continue
        k = int(answer.fooled.argmax())
        good, bad = radii[k], radii[k - 1] if k else 0.0
        yield from subject.secure(_at(subject, direction, good))
        while good - bad > 0.05 * good:
            middle = (good + bad) / 2
            answer = yield subject.ask(_at(subject, direction, middle)[None])
            good, bad = (middle, bad) if answer.fooled[0] else (good, middle)
        if good < radius:
            x = yield from subject.settle(_at(subject, direction, good))
            if subject.found:
                best, radius = direction, subject.distance(x)
    return best, radius


def _patterns(subject: Subject) -> Iterator[Array]:
    """The signs of the caller's starts, all ones, random ones, those of images of other classes."""
    for given in subject.given:
        if (given != subject.image).any():
            yield np.where(given < subject.image, -1.0, 1.0)
    yield np.ones_like(subject.image)
    yield -np.ones_like(subject.image)
    shape = subject.image.shape
    for _ in range(2 * PATTERNS - 2):
        yield enlarged(subject.rng.choice((-1.0, 1.0), blocks(shape, COARSE)), shape, COARSE)
    for other in subject.others():
        yield np.where(other < subject.image, -1.0, 1.0)


def _nested(places: Places, rng: np.random.Generator | None = None) -> Places:
    """Places (C, H, W) in an order (C*H*W,) whose 2^l-th parts are blocks, near-square, for every l.

    With rng the cuts are not in the middle but about there.
    """
    if places.size <= 1:
        return places.ravel()
    spatial = max(places.shape[1:])
    axis = places.shape.index(spatial, 1) if spatial > 1 else 0
    length = places.shape[axis]
    cut = length // 2 if rng is None else int(np.clip(round(length * rng.uniform(0.35, 0.65)), 1, length - 1))
    return np.concatenate([_nested(part, rng) for part in np.split(places, [cut], axis)])
