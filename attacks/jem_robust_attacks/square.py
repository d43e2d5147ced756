"""Square Attack (Andriushchenko, Croce, Flammarion & Hein 2020): random search on scores by square-shaped changes."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jem_robust_attacks.search import Subject
from jem_robust_attacks.sequential import Array, Ask, Majority, Search
from jem_robust_attacks.starts import DecisionAttack

HALVINGS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)  # shares of the budget after which squares halve


@dataclass(frozen=True)
class Square(DecisionAttack):
    """Raises the margin within eps, which must be given, by changing one square at a time; norm "linf" or "l2".

    p: share of the image that a square covers at first. eot: draws whose mean margin stands for an
    image of a random model; what is kept is measured anew, so that a lucky draw does not block the search.
    Success: misclassified with probability at least `fooling_rate`, as for the decision attacks. Where that is not
    reached, `search` and `candidates` still hand over the image of the largest margin.
    """

    norm: str = "linf"
    p: float = 0.8
    eot: int = 2
    norms: ClassVar[tuple[str, ...]] = ("linf", "l2")
    minimizes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.p <= 1:
            raise ValueError(f"expected p in (0, 1], got {self.p!r}: the share of the image a square covers")
        if isinstance(self.eot, bool) or not isinstance(self.eot, int) or self.eot < 1:
            raise ValueError(f"expected eot of at least 1, got {self.eot!r}: pass a whole number")

    def _walk(self, subject: Subject) -> Search:
        image, rng, eps = subject.image, subject.rng, subject.eps or 0.0
        if eps == 0 or not image.size:
            return
        test = Majority(self.eot)
        linf = self.norm == "linf"
        x = _within(subject, image + (_stripes if linf else _tiles)(image.shape, eps, rng), self.norm)
        options = np.stack([x, *(_within(subject, given, self.norm) for given in subject.given)])
        answer = yield Ask(options, test)
        x, value = options[answer.margins.argmax()], float(answer.margins.max())
        while True:
            subject.last = x
            if value > 0:
                answer = yield subject.ask(x[None])
                if answer.fooled[0]:
                    yield from subject.settle(x)
                    if subject.found:
                        return
            kept = value
            while kept == value:
                side = self._side(subject)
                moved = (_recoloured if linf else _shifted)(x, image, eps, side, rng)
                trial = _within(subject, moved, self.norm)
                answer = yield Ask(trial[None], test)
                if answer.margins[0] > value:
                    x, kept = trial, float(answer.margins[0])
            value = kept
            if not subject.deterministic:
                answer = yield Ask(x[None], test)
                value = float(answer.margins[0])

    def _side(self, subject: Subject) -> int:
        """Side of the square at this point of the budget."""
        height, width = subject.image.shape[1:]
        share = self.p / 2 ** np.searchsorted(HALVINGS, subject.spent / subject.limit)
        return int(np.clip(round((share * height * width) ** 0.5), 1, min(height, width)))


def _within(subject: Subject, x: Array, norm: str) -> Array:
    """x drawn into the ball and the box."""
    delta, eps = x - subject.image, subject.eps or 0.0
    if norm == "linf":
        delta = np.clip(delta, -eps, eps)
    else:
        delta *= min(1.0, eps / max(float(np.linalg.norm(delta)), 1e-300))
    return np.clip(subject.image + delta, *subject.bounds)


def _stripes(shape: tuple[int, ...], eps: float, rng: np.random.Generator) -> Array:
    return np.broadcast_to(eps * rng.choice((-1.0, 1.0), (shape[0], 1, shape[2])), shape)


def _recoloured(x: Array, image: Array, eps: float, side: int, rng: np.random.Generator) -> Array:
    """One square at +-eps, a sign for each channel."""
    rows, columns = _window(image.shape, side, rng)
    moved = x.copy()
    signs = rng.choice((-1.0, 1.0), (image.shape[0], 1, 1))
    moved[:, rows, columns] = image[:, rows, columns] + eps * signs
    return moved


def _tiles(shape: tuple[int, ...], eps: float, rng: np.random.Generator) -> Array:
    """A tiling by bumps of random sign, of length eps."""
    channels, height, width = shape
    side = max(1, min(height, width) // 5)
    delta = np.zeros(shape)
    for i in range(0, height - side + 1, side):
        for j in range(0, width - side + 1, side):
            delta[:, i : i + side, j : j + side] = _bump(side, rng) * rng.choice((-1.0, 1.0), (channels, 1, 1))
    return delta * (eps / np.linalg.norm(delta))


def _shifted(x: Array, image: Array, eps: float, side: int, rng: np.random.Generator) -> Array:
    """The change of one window goes into another, where a bump is mixed in, with all that eps still leaves unused."""
    delta = x - image
    to, source = _window(image.shape, side, rng), _window(image.shape, side, rng)
    spare = max(0.0, eps**2 - float(np.vdot(delta, delta)))
    both = np.zeros(image.shape[1:], np.bool_)
    both[to] = both[source] = True
    bump = _bump(side, rng)
    moved = delta.copy()
    moved[:, source[0], source[1]] = 0
    for channel in range(len(image)):
        inside = delta[channel][to]
        shape = rng.choice((-1.0, 1.0)) * bump + inside / max(float(np.linalg.norm(inside)), 1e-10)
        budget = float((delta[channel][both] ** 2).sum()) + spare / len(image)
        moved[channel][to] = shape * (budget**0.5 / max(float(np.linalg.norm(shape)), 1e-10))
    return image + moved


def _window(shape: tuple[int, ...], side: int, rng: np.random.Generator) -> tuple[slice, slice]:
    i, j = (int(rng.integers(n - side + 1)) for n in shape[1:])
    return slice(i, i + side), slice(j, j + side)


def _bump(side: int, rng: np.random.Generator) -> Array:
    """Two peaks of opposite sign, side by side or one below the other, each falling off towards its edges; length 1."""
    half = max(1, side // 2)
    pattern = np.concatenate([_peak(half, side), -_peak(side - half, side)]) if side > 1 else np.ones((1, 1))
    pattern = pattern if rng.random() < 0.5 else pattern.T
    return np.asarray(pattern / np.linalg.norm(pattern))


def _peak(height: int, width: int) -> Array:
    """Rings around the middle; going inwards each adds 1 / (rings left)^2."""
    i, j = np.arange(height)[:, None], np.arange(width)[None]
    ring = np.minimum(np.minimum(i, height - 1 - i), np.minimum(j, width - 1 - j))
    count = int(ring.max()) + 1
    return np.asarray(np.cumsum(1 / np.arange(count, 0, -1.0) ** 2)[ring])
