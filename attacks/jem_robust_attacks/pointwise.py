"""Pointwise attack (Schott, Rauber, Bethge & Brendel 2018): undo a noisy start pixel by pixel; labels only.

Beyond the paper: resets are asked for in blocks that halve, all blocks of a size at once; and what is left is improved
by exchanging pixels. Which of two sets of changes is the stronger shows in how far each can be scaled down as a whole:
one query tells whether an exchange allows for less than before.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from jem_robust_attacks.search import Subject
from jem_robust_attacks.sequential import Answer, Array, Ask, Flags, Places, Search
from jem_robust_attacks.starts import DecisionAttack, shortened, start

GRANULARITIES = ("pixel", "channel")
RESTARTS = 4  # starts at most,
STARTING = 0.2  # in this share of the budget; the rest goes into the best
FAILURES = 6  # times that noise does not fool before a start is given up
NEAR = 8  # how much the likelier neighbours of kept pixels come early
SHARE = 0.5  # of the budget for few pixels where another norm is wanted
EXCHANGES = 3  # asked about at once
DROPS = 8  # asked about at once
WORTH = 0.1  # of the average pixel's part: what an exchange must gain
FACTORS = (0.5, 0.75, 0.9)  # by which changes are scaled down in the end
Picture = Generator[Ask, Answer, Array]


@dataclass(frozen=True)
class PointwiseAttack(DecisionAttack):
    """Minimises the number of changed pixels ("l0"), then, for "l2" and "linf", the sizes of the changes.

    granularity: "pixel" resets all channels of a place at once, "channel" each by itself (l0 counts pixels all the
    same). Needs images (N, C, H, W).
    """

    norm: str = "l0"
    granularity: str = "pixel"
    norms: ClassVar[tuple[str, ...]] = ("l0", "l2", "linf")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.granularity not in GRANULARITIES:
            raise ValueError(f"expected a granularity out of {GRANULARITIES}, got {self.granularity!r}")

    def _walk(self, subject: Subject) -> Search:
        canvas = _Canvas(subject, 1 if self.granularity == "channel" else len(subject.image))
        pool: list[Array] = []
        while not pool or (len(pool) < RESTARTS and subject.spent < STARTING * subject.limit):
            x = yield from _grown(canvas)
            if not canvas.places(x).size and not pool:
                x = canvas.of((yield from start(subject)))
                if not subject.found:
                    return
                x = yield from _grown(canvas, x)
            pool.append((yield from _drawn(canvas, x, 0.0)))
        pool = [x for x in pool if canvas.places(x).size]  # a random model may have set a search back to nothing
        if not pool:
            return
        x = min(pool, key=lambda x: canvas.places(x).size)
        x = yield from _exchanged(canvas, x, pool, 1.0 if self.norm == "l0" else SHARE)
        if self.norm != "l0":
            scale = yield from shortened(subject, lambda t: canvas.image(canvas.scaled(x, t)), 1.0, 0.01)
            x = canvas.scaled(x, scale)
            for factor in FACTORS:
                x = yield from _drawn(canvas, x, factor)


class _Canvas:
    """Images as columns (G, U) that are changed or not: of a pixel's channels, or of single values."""

    def __init__(self, subject: Subject, rows: int) -> None:
        self.subject, self.rng = subject, subject.rng
        self.shape, self.rows = subject.image.shape, rows
        self.clean = subject.image.reshape(rows, -1)

    def of(self, image: Array) -> Array:
        """Columns (G, U) of an image (C, H, W)."""
        return image.reshape(self.clean.shape)

    def image(self, x: Array) -> Array:
        """And back."""
        return x.reshape(self.shape)

    def ask(self, pictures: Sequence[Array]) -> Ask:
        """Do these (G, U) fool?"""
        return self.subject.ask(np.stack([self.image(x) for x in pictures]))

    def places(self, x: Array) -> Places:
        """Changed columns, shuffled."""
        return self.rng.permutation(np.flatnonzero((x != self.clean).any(0)))

    def scaled(self, x: Array, factor: float, places: Places | slice = slice(None)) -> Array:
        """Changes in these columns scaled down: 0 resets them."""
        y = x.copy()
        y[:, places] = self.clean[:, places] + factor * (x[:, places] - self.clean[:, places])
        return y

    def filled(self, x: Array, target: Array, order: Places, count: int) -> Array:
        """x with the first so many columns of an order taken from a target."""
        y = x.copy()
        y[:, order[:count]] = target[:, order[:count]]
        return y

    def noise(self) -> Array:
        """All columns at the bounds, more often at the farther one."""
        low, high = self.subject.bounds
        far = np.where(self.clean > (low + high) / 2, low, high)
        return np.where(self.rng.random(self.clean.shape) < 0.5, far, self.rng.choice((low, high), self.clean.shape))

    def likened(self, x: Array, target: Array) -> tuple[Array, Flags]:
        """The target with the neighbours of what x changes taking after it, and which columns (U,) these are."""
        grid = (self.rows, -1, *self.shape[1:])
        like, source, changed = target.reshape(grid).copy(), x.reshape(grid), (x != self.clean).reshape(grid).any(0)
        near = np.zeros_like(changed)
        for axis, step in ((1, 1), (1, -1), (2, 1), (2, -1)):
            beside = np.roll(changed, step, axis)
            np.moveaxis(beside, axis, 0)[0 if step > 0 else -1] = False  # nothing comes round from the other side
            like = np.where(beside, np.roll(source, step, axis + 1), like)
            near |= beside
        return like.reshape(x.shape), near.reshape(-1)

    def noted(self, x: Array) -> Picture:
        """x, which fools, settled on where it is the closest; returns where to go on from."""
        if self.subject.distance(self.image(x)) >= self.subject.reach:
            return x
        return self.of((yield from self.subject.settle(self.image(x))))


def _grown(canvas: _Canvas, given: Array | None = None) -> Picture:
    """Few pixels that fool together; the clean picture where random ones do not.

    Pixels in random order are set to noise (or to the values of a picture that fools) until the model gives way. The
    pixel at which it does is kept and all others are reset; then again, behind those that were kept, until they do by
    themselves. Pixels that matter much are the likelier to be such a last straw.
    """
    kept = best = canvas.clean
    count, most, failures = 0, 0, 0
    size = first = max(1, canvas.clean.shape[1] // 20)
    while failures < FAILURES:
        target, near = canvas.likened(kept, canvas.noise()) if given is None else (given, np.False_)
        free = np.flatnonzero((kept == canvas.clean).all(0) & (target != canvas.clean).any(0))
        keys = canvas.rng.exponential(size=canvas.clean.shape[1]) / np.where(near, NEAR, 1)
        path = partial(canvas.filled, kept, target, free[np.argsort(keys[free])])
        low, high, fooled = 0, 0, False
        while not fooled and high < free.size:
            low, high = high, min(2 * high or size, free.size)
            fooled = bool((yield canvas.ask([path(high)])).fooled[0])
        if not fooled:
            failures, size = failures + 1, first
            continue
        if not count:
            yield from canvas.noted(path(high))
        while high - low > 1:
            middle = (low + high) // 2
            answer = yield canvas.ask([path(middle)])
            low, high = (low, middle) if answer.fooled[0] else (middle, high)
        best = path(high)
        if canvas.subject.deterministic:  # a random model may not confirm what lies at the boundary itself
            yield from canvas.noted(best)
        count, most, size = count + 1, most or high, max(1, 3 * high // 4)
        if high == 1 or count >= most:
            break
        kept = canvas.filled(kept, best, np.flatnonzero((best != path(high - 1)).any(0)), 1)
    return best


def _drawn(canvas: _Canvas, x: Array, factor: float) -> Picture:
    """Scale changes by `factor` in blocks of halving size until no pixel's can be; factor 0 resets."""
    size = max(1, canvas.places(x).size // 16)
    while (places := canvas.places(x)).size:  # none are left where a random model set the search back to the image
        blocks = np.array_split(places, -(-places.size // size))
        answer = yield canvas.ask([canvas.scaled(x, factor, block) for block in blocks])
        loose = [block for block, fooled in zip(blocks, answer.fooled, strict=True) if fooled]
        if loose:
            # Each can be drawn alone; as many as possible together, by bisection.
            low, high, count = 1, len(loose) + 1, len(loose)
            while high - low > 1:
                answer = yield canvas.ask([canvas.scaled(x, factor, np.concatenate(loose[:count]))])
                low, high = (count, high) if answer.fooled[0] else (low, count)
                count = (low + high) // 2
            x = yield from canvas.noted(canvas.scaled(x, factor, np.concatenate(loose[:low])))
        elif size == 1:
            return (yield from canvas.noted(x))
        size = max(1, size // 2)
    return x


def _exchanged(canvas: _Canvas, x: Array, pool: list[Array], share: float) -> Picture:
    """Exchange changed pixels as long as the set gains strength, and drop one when it can be spared."""
    subject = canvas.subject
    strength = yield from shortened(subject, lambda t: canvas.image(canvas.scaled(x, t)), 1.0, 0.02)
    while canvas.places(x).size > 1 and subject.spent < share * subject.limit:
        count = canvas.places(x).size
        gain = WORTH / count
        offers = [_exchange(canvas, x, pool) for _ in range(EXCHANGES)]
        answer = yield canvas.ask([canvas.scaled(y, strength * (1 - gain)) for y in offers])
        if not answer.fooled.any():
            continue
        x = offers[int(answer.fooled.argmax())]
        strength = yield from _strength(canvas, x, strength * (1 - gain), gain)
        while strength < 1 - 0.4 / canvas.places(x).size:
            fewer = yield from _dropped(canvas, x)
            if fewer is x:
                break
            x = yield from canvas.noted(fewer)
            strength = yield from _strength(canvas, x, 1.0, gain)
    return x


def _strength(canvas: _Canvas, x: Array, known: float, gain: float) -> Generator[Ask, Answer, float]:
    """The least scale at which x still fools, to the share `gain`, from one that is known."""
    return (yield from shortened(canvas.subject, lambda t: canvas.image(canvas.scaled(x, t)), known, gain))


def _exchange(canvas: _Canvas, x: Array, pool: list[Array]) -> Array:
    """One changed pixel reset, another one changed: one that served in the pool, a neighbour's likeness, or any."""
    places, rng = canvas.places(x), canvas.rng
    y = canvas.scaled(x, 0.0, places[:1])
    kind = rng.integers(3)
    if kind == 0:
        other = pool[rng.integers(len(pool))]
        place = canvas.places(other)[0]
        y[:, place] = other[:, place]
        return y
    if kind == 1:
        source = int(places[-1])
        place = (source + int(rng.choice((-1, 1, -canvas.shape[-1], canvas.shape[-1])))) % x.shape[1]
        y[:, place] = np.where(x[:, source] > canvas.clean[:, source], *canvas.subject.bounds[::-1])
        return y
    y[:, rng.integers(x.shape[1])] = rng.choice(canvas.subject.bounds, len(x))
    return y


def _dropped(canvas: _Canvas, x: Array) -> Picture:
    """x with one pixel fewer, or x itself where each is needed."""
    places = canvas.places(x)
    for begin in range(0, places.size, DROPS):
        fewer = [canvas.scaled(x, 0.0, places[i : i + 1]) for i in range(begin, min(begin + DROPS, places.size))]
        answer = yield canvas.ask(fewer)
        if answer.fooled.any():
            return fewer[int(answer.fooled.argmax())]
    return x
