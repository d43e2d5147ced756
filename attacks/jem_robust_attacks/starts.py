"""How a decision attack starts: its settings and inputs, one subject an image, adversarial points to go on from."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from jem_robust_attacks.batch import Batch, Report, check_starts
from jem_robust_attacks.norms import distance, parse_epsilon, parse_norm, rounded, spread
from jem_robust_attacks.result import AttackResult
from jem_robust_attacks.search import Subject, distances, hunt, run
from jem_robust_attacks.sequential import Answer, Array, Ask, Counts, Search

STREAM = 2  # word that keys the random numbers of these attacks
CANDIDATES = (1.0, 1.1, 1.3, 2.0)  # times the least distance: what a search hands over beside its best image
OTHERS = 5  # images of other classes tried
LEVELS = (0.1, 0.2, 0.35, 0.5, 0.75, 1.0)  # shares of noise in the blends
TRIES = 12  # noise images tried, the first half whatever they give
ATTEMPTS = 2  # rounds of noise
SIDES = (1, 2, 4)  # of the blocks on which noise is constant, in pixels: networks differ in what fools them
KEPT = 3  # points that are bisected
BISECTIONS = 8


@dataclass(frozen=True)
class DecisionAttack(ABC):
    """What the attacks share: settings, one search an image, and the result.

    max_queries: draws an image may cost, each of all chains and confirmations included. fooling_rate: how often a
    random model must misclassify an image that is to count as adversarial. Raises ValueError on settings out of range.
    """

    norm: str = "l2"
    max_queries: int = 5000
    fooling_rate: float = 0.9
    norms: ClassVar[tuple[str, ...]] = ("l2",)
    minimizes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", parse_norm(self.norm, self.norms))
        if isinstance(self.max_queries, bool) or not isinstance(self.max_queries, int) or self.max_queries < 1:
            raise ValueError(f"expected max_queries of at least 1, got {self.max_queries!r}: pass a whole number")
        if not 0.5 <= self.fooling_rate < 1:
            raise ValueError(f"expected a fooling_rate from 0.5 to below 1, got {self.fooling_rate!r}: 0.9 is usual")

    @abstractmethod
    def _walk(self, subject: Subject) -> Search:
        """The search for one image, which is right from the start; it may go on for ever."""

    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(
        self, model: Any, images: Any, labels: Any, eps: Any = None, seed: int = 0, image_ids: Any = None,
        starts: Any = None, progress: Report | None = None,
    ) -> AttackResult:  # fmt: skip
        """Attack images (N, C, H, W) of true labels (N,); starts: adversarial guesses (N, C, H, W) or (N, S, C, H, W).

        An image is adversarial when misclassified with probability `fooling_rate` or more; one that is so already is
        left alone, distance 0. With eps, success means in addition a distance of at most eps.
        """
        batch, subjects, nonfinite = self._attacked(model, images, labels, eps, seed, image_ids, starts, progress)
        candidates = _candidates(batch, subjects)
        already = torch.tensor([s.wrong_already for s in subjects], dtype=torch.bool, device=batch.images.device)
        found = torch.tensor([bool(s.anchors) for s in subjects], dtype=torch.bool, device=batch.images.device)
        reach = distance(candidates[:, 0], batch.images, self.norm)
        success = already | found & (reach <= torch.inf if eps is None else reach <= parse_epsilon(eps) + 1e-6)
        adversarials = torch.where(spread(success & ~already, batch.images), candidates[:, 0], batch.images)
        distances = torch.where(success, reach, torch.inf)
        return AttackResult(adversarials, distances, success, batch.queries, candidates, nonfinite)

    @torch.inference_mode(False)
    @torch.no_grad()
    def search(
        self, model: Any, images: Any, labels: Any, eps: Any = None, seed: int = 0, image_ids: Any = None,
        starts: Any = None, progress: Report | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Candidates (N, M, C, H, W), the best first, and nonfinite flags (N,), for a caller with its own verdict."""
        batch, subjects, nonfinite = self._attacked(model, images, labels, eps, seed, image_ids, starts, progress)
        return _candidates(batch, subjects), nonfinite

    def _attacked(
        self, model: Any, images: Any, labels: Any, eps: Any, seed: int, image_ids: Any, starts: Any,
        progress: Report | None,
    ) -> tuple[Batch, list[Subject], Tensor]:  # fmt: skip
        radius = None if eps is None else parse_epsilon(eps)
        if radius is None and not self.minimizes:
            raise ValueError(
                "expected eps, got None: this attack searches within a ball, so pass its radius, e.g. 8/255"
            )
        batch = Batch.of(model, images, labels, seed, image_ids, progress, self.max_queries)
        subjects = self._subjects(batch, radius, starts)
        return batch, subjects, run(batch, subjects, [hunt(s, self._walk(s)) for s in subjects])

    def _subjects(self, batch: Batch, eps: float | None, starts: Any) -> list[Subject]:
        if batch.images.dim() != 4:
            raise ValueError(f"expected images (N, C, H, W), got {tuple(batch.images.shape)}: reshape them")
        pictures, labels = batch.images.double().cpu().numpy(), batch.labels.cpu().numpy()
        given = _given(starts, batch)
        limit = self.max_queries - int(batch.queries.max()) if len(pictures) else 0  # what probing has cost
        return [
            Subject(
                image, batch.target.bounds, self.norm, self.fooling_rate, batch.target.deterministic,
                batch.generator(row, STREAM), limit, eps, given[row], partial(_nearest, pictures, labels, row),
            )
            for row, image in enumerate(pictures)
        ]  # fmt: skip


def _given(starts: Any, batch: Batch) -> Array:
    """The caller's starts as (N, S, C, H, W)."""
    shape = tuple(batch.images.shape)
    if starts is None:
        return np.zeros((shape[0], 0, *shape[1:]))
    guesses = torch.as_tensor(starts).detach()
    if not guesses.is_floating_point():
        raise TypeError(f"expected floating point starts, got {guesses.dtype}: divide by 255")
    given = guesses.double().cpu()
    given = given.unsqueeze(1) if given.dim() == len(shape) else given
    if given.shape[:1] + given.shape[2:] != shape:
        raise ValueError(f"expected starts {shape} or (N, S, C, H, W), got {tuple(given.shape)}: one or more an image")
    check_starts(given, batch.target.bounds)
    return given.clamp(*batch.target.bounds).numpy()


def _nearest(pictures: Array, labels: Counts, row: int) -> Array:
    """The nearest images (S, C, H, W) of other classes."""
    others = np.flatnonzero(labels != labels[row])
    return pictures[others[np.argsort(distances(pictures[others], pictures[row], "l2"), kind="stable")[:OTHERS]]]


def _candidates(batch: Batch, subjects: list[Subject]) -> Tensor:
    """(N, M, C, H, W), exactly as they were asked about; the image itself where nothing was found."""
    if not subjects:
        return batch.images.unsqueeze(1).clone()
    found = torch.from_numpy(np.stack([_spread_out(subject) for subject in subjects])).to(batch.images.device)
    return rounded(found, batch.images.double().unsqueeze(1), batch.images.dtype)


def _spread_out(subject: Subject) -> list[Array]:
    """The best image and some that lie a little further out (they may convince more of a random model's draws)."""
    found = subject.anchors[::-1] or [subject.image if subject.last is None else subject.last]
    reach = [subject.distance(x) for x in found]
    return [
        next((x for x, d in zip(found, reach, strict=True) if d >= times * reach[0]), found[-1]) for times in CANDIDATES
    ]


def blend(image: Array, others: Array, shares: Array) -> Array:
    """Shares (m,) of others (m, C, H, W) or (C, H, W) in the image: (m, C, H, W)."""
    weights = shares.reshape(-1, *[1] * image.ndim)
    return np.asarray((1 - weights) * image + weights * others)


def blocks(shape: tuple[int, ...], side: int) -> tuple[int, ...]:
    """Shape of an image (C, H, W) when blocks of `side` pixels count as one."""
    return shape[0], *[-(-n // side) for n in shape[1:]]


def enlarged(values: Array, shape: tuple[int, ...], side: int) -> Array:
    """Values of `blocks(shape, side)` spread over blocks: (C, H, W)."""
    for axis in range(1, len(shape)):
        values = values.repeat(side, axis)
    return values[tuple(slice(n) for n in shape)]


def noises(subject: Subject) -> Iterator[Array]:
    """Noise all over the box in several resolutions, even and only at the bounds by turns."""
    shape, (low, high) = subject.image.shape, subject.bounds
    for t in range(TRIES):
        side = SIDES[t % len(SIDES)]
        values = subject.rng.uniform(low, high, blocks(shape, side))
        if t // len(SIDES) % 2:
            values = np.where(values < (low + high) / 2, low, high)
        yield enlarged(values, shape, side)


def start(subject: Subject) -> Generator[Ask, Answer, Array]:
    """An adversarial point near the boundary: from the caller's, else noise blended in, else images of other classes.

    The image itself where nothing was found; see `Subject.found`.
    """
    given = subject.given[distances(subject.given, subject.image, "linf") > 0]
    for source in (_fooling(subject, given), *(_from_noise(subject) for _ in range(ATTEMPTS)), _from_others(subject)):
        points = yield from source
        points = points[np.argsort(distances(points, subject.image, subject.norm), kind="stable")][:KEPT]
        for point in points:
            if not subject.found:
                yield from subject.secure(point)
        if subject.anchors:
            points = np.stack(subject.anchors[-1:])
        if len(points) and (subject.anchors or subject.deterministic):
            points = yield from bisect(subject, points)
            return (yield from subject.settle(min(points, key=subject.distance)))
    return subject.image


def _fooling(subject: Subject, points: Array) -> Generator[Ask, Answer, Array]:
    if len(points):
        answer = yield subject.ask(points)
        points = points[answer.fooled]
    return points


def _from_others(subject: Subject) -> Generator[Ask, Answer, Array]:
    return (yield from _fooling(subject, subject.others()))


def _from_noise(subject: Subject) -> Generator[Ask, Answer, Array]:
    found: list[Array] = []
    for t, noise in enumerate(noises(subject)):
        if t >= TRIES // 2 and found:
            break
        blends = yield from _fooling(subject, blend(subject.image, noise, np.array(LEVELS)))
        found += list(blends[: 1 if subject.deterministic else 2][-1:])  # not too near a random model's boundary
        if found and not subject.found and subject.spent > subject.limit // 4:
            yield from subject.secure(found[-1])  # better than looking for a nearer one until nothing is left
    return np.array(found).reshape(-1, *subject.image.shape)


def bisect(subject: Subject, points: Array, steps: int = BISECTIONS) -> Generator[Ask, Answer, Array]:
    """Draw adversarial points (m, C, H, W) towards the image as far as they stay so, to 2^-steps of the way."""
    low, high = np.zeros(len(points)), np.ones(len(points))
    for _ in range(steps):
        middle = (low + high) / 2
        answer = yield subject.ask(blend(subject.image, points, middle))
        low, high = np.where(answer.fooled, low, middle), np.where(answer.fooled, middle, high)
    return blend(subject.image, points, high)


def shortened(
    subject: Subject, path: Callable[[float], Array], known: float, gain: float
) -> Generator[Ask, Answer, float]:
    """The least parameter at which path(t) (C, H, W) fools, to the share `gain`, going down from one known to fool."""
    good, bad, step = known, 0.0, gain * known
    while good - bad > 1.5 * gain * known:
        trial = (good + bad) / 2 if bad else max(good - step, good / 2)
        answer = yield subject.ask(path(trial)[None])
        if answer.fooled[0]:
            good, step = trial, 2 * step
        elif good == known:
            break  # most often there is nothing to gain
        else:
            bad = trial
    return good
