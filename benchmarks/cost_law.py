"""What a gradient should cost by the laws of `laws.py`, and how far a measured one is off."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SIDE = 28
TOLERANCE = 0.1
Row = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """What a gradient is taken of. budget: "usual", "least" (one step's graph) or "unlimited"."""

    k: int = 10
    chains: int = 1
    draws: int = 1
    batch: int = 32
    side: int = SIDE
    budget: str = "usual"

    @property
    def law(self) -> float:
        """F an image: while all graphs are kept, or with those of one step only."""
        steps = 4 * self.k + 2 + 2 * (self.k - self.kept)
        return steps * (self.chains if self.k else 1) * self.draws * (self.side / SIDE) ** 2

    @property
    def kept(self) -> int:
        """Steps whose graphs the law assumes to stay."""
        return min(self.k, 1) if self.budget == "least" else self.k


def recomputes(work: float, law: float) -> bool:
    return work > 1.01 * law


def straight_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope of the line of least relative squares through points with y > 0."""
    slope, intercept = np.polyfit(x, y, 1, w=1 / np.asarray(y))
    return float(intercept), float(slope)


def extent(part: str, value: float) -> float:
    """What cost is a straight line in."""
    return value**2 if part == "side" else value


def share(part: str, value: float) -> float:
    """Images in a call."""
    return value if part == "batch" else Point.batch


def per_call(part: str, row: Row, of: str) -> float:
    """How many of a row's figures make up a call: F are an image's, MB a call's."""
    return share(part, row["value"]) if of == "F" else 1


def line(part: str, rows: Sequence[Row], of: str) -> tuple[float, float]:
    """The line of a call's cost (F or MB) over extent, through what recomputes nothing."""
    kept = [r for r in rows if r["budget"] == "usual" and not recomputes(r["work F"], r["law F"])]
    return straight_line([extent(part, r["value"]) for r in kept], [r[of] * per_call(part, r, of) for r in kept])


def judged(part: str, rows: Sequence[Row]) -> list[Row]:
    """The rows with what law (time's goes through the base point) and line say, how far they are off, and why."""
    base = next(r for r in rows if r["value"] == getattr(Point, part) and r["budget"] == "usual")
    found = [dict(r) for r in rows]
    for of, scale in (("F", base["F"] / base["law F"]), ("MB", 1.0)):
        intercept, slope = line(part, rows, of)
        for r in found:
            r[f"{of} expected"] = law = scale * r[f"law {of}"]
            straight = (intercept + slope * extent(part, r["value"])) / per_call(part, r, of)
            r[f"{of} straight"] = straight = law if r["budget"] == "least" else straight
            recomputed = recomputes(r["work F"], r["law F"])
            r[f"{of} off"], r[f"{of} why"] = departure(r[of], law, straight, recomputed)
    return found


def departure(cost: float, law: float, straight: float, recomputed: bool) -> tuple[float, str | None]:
    """By what share cost is off, and the cause where that is more than the tolerance.

    What recomputes is held against the straight line of what does not, everything else against the law.
    """
    off_law, off_line = cost / law - 1, cost / straight - 1
    off = off_line if recomputed else off_law
    if abs(off) <= TOLERANCE:
        return off, None
    return off, "budget" if recomputed else "fixed" if abs(off_line) <= TOLERANCE else "other"
