"""Pointwise attack (Schott, Rauber, Bethge & Brendel 2018): undo a noisy start pixel by pixel; labels only.

Beyond the paper: resets are asked for in blocks that halve, all blocks of a size at once; and what is left is improved
by exchanging pixels. Which of two sets of changes is the stronger shows in how far each can be scaled down as a whole:
one query tells whether an exchange allows for less than before.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jem_robust_attacks.sequential import Answer, Array, Ask, Places, Search, Subject
from jem_robust_attacks.starts import DecisionAttack, shortened, start

GRANULARITIES = ("pixel", "channel")
SPRINKLED = (0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0)  # shares of the pixels that are set to noise
RESTARTS = 4  # noisy starts that are pruned; the rest of the budget goes into the best
FAILURES = 6  # noisy starts in vain before other ones are tried
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
        for tried in range(RESTARTS + FAILURES):
            if len(pool) == RESTARTS or (tried >= FAILURES and not pool) or len(subject.given):
                break
            noisy = yield from _sprinkled(canvas)
            if canvas.places(noisy).size:
                pool.append((yield from _drawn(canvas, noisy, 0.0)))
        pool = [x for x in pool if canvas.places(x).size]
        if not pool:
            x = yield from start(subject)
            if not subject.found:
                return
            pool.append((yield from _drawn(canvas, canvas.of(x), 0.0)))
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

    def corners(self, count: int) -> Array:
        """Columns (G, count) with values at the bounds."""
        return self.rng.choice(self.subject.bounds, (self.rows, count))

    def noted(self, x: Array) -> Picture:
        """x, which fools, settled on where it is the closest; returns where to go on from."""
        if self.subject.distance(self.image(x)) >= self.subject.reach:
            return x
        return self.of((yield from self.subject.settle(self.image(x))))


def _sprinkled(canvas: _Canvas) -> Picture:
    """The fewest pixels of a random sequence, set to the bounds, that fool; the clean picture where all do not."""
    count = canvas.clean.shape[1]
    order, values = canvas.rng.permutation(count), canvas.corners(count)

    def first(n: int) -> Array:
        x = canvas.clean.copy()
        x[:, order[:n]] = values[:, order[:n]]
        return x

    counts = sorted({max(1, round(share * count)) for share in SPRINKLED})
    answer = yield canvas.ask([first(n) for n in counts])
    if not answer.fooled.any():
        return canvas.clean
    k = int(answer.fooled.argmax())
    low, high = counts[k - 1] if k else 0, counts[k]
    yield from canvas.subject.secure(canvas.image(first(high)))
    while high - low > 1:
        middle = (low + high) // 2
        answer = yield canvas.ask([first(middle)])
        low, high = (low, middle) if answer.fooled[0] else (middle, high)
    return first(high)


def _drawn(canvas: _Canvas, x: Array, factor: float) -> Picture:
    """Scale changes by `factor` in blocks of halving size until no pixel's can be; factor 0 resets."""
    size = max(1, canvas.places(x).size // 4)
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
    y[:, rng.integers(x.shape[1])] = canvas.corners(1)[:, 0]
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
