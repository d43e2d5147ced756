"""One search an image, and the loop that runs them all with one forward a round.

An attack writes its search for a single image as a generator: it yields an `Ask` (images to judge) and receives an
`Answer`. `run` advances all searches of a batch together: every image that is not decided yet gets one more draw, all
of them in one forward. A search knows nothing of its neighbours, so batch size and order cannot change what it finds.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch
from torch import Tensor

from jem_robust_attacks.batch import Batch
from jem_robust_attacks.losses import margin, wrong
from jem_robust_attacks.norms import rounded
from jem_robust_attacks.sequential import (
    CAUTION,
    Answer,
    Array,
    Ask,
    Flags,
    Majority,
    Places,
    Search,
    confirming,
    searching,
)

THIN = 0.95  # accepted images whose distances differ by less are not kept apart
ANCHOR = 0.8  # a random model's image is confirmed whenever the distance has fallen by this factor
ROWS = 1024  # asked about in one call
CONFIRMATIONS = 3  # draws for so many clear confirmations are kept back for the end


@dataclass
class Subject:
    """One image under attack and what was found. image (C, H, W); draws are counted and limited here.

    given (S, C, H, W): the caller's starts. others: gives images of other classes (S, C, H, W), the nearest first.
    """

    image: Array
    bounds: tuple[float, float]
    norm: str
    rate: float
    deterministic: bool
    rng: np.random.Generator
    limit: int
    eps: float | None
    given: Array
    others: Callable[[], Array]
    spent: int = 0
    wrong_already: bool = False
    caution: int = 0
    anchors: list[Array] = field(default_factory=list)  # confirmed, the best one last
    trail: list[Array] = field(default_factory=list)  # accepted since then, the best one last
    last: Array | None = None  # what is handed over where nothing was found, the image itself by default

    def distance(self, x: Array) -> float:
        """Distance of x (C, H, W) from the image."""
        return float(distances(x[None], self.image, self.norm)[0])

    def ask(self, images: Array) -> Ask:
        """Do these (m, C, H, W) fool? The cheap question."""
        return Ask(images, searching(self.rate, self.caution))

    @property
    def reach(self) -> float:
        """Distance of the closest image settled on, infinite before."""
        found = self.trail or self.anchors
        return self.distance(found[-1]) if found else np.inf

    @property
    def found(self) -> bool:
        """Whether anything was settled on."""
        return bool(self.anchors or self.trail)

    def settle(self, x: Array) -> Generator[Ask, Answer, Array]:
        """Note x (C, H, W), accepted and closer than all before; returns where to go on from.

        On a random model x is confirmed whenever it is much closer than what is confirmed so far. A walk that drifted
        to where the model is fooled only now and then is set back to the last confirmed image, or the image itself, and
        becomes more cautious.
        """
        if self.deterministic or (self.anchors and self.distance(x) > ANCHOR * self.distance(self.anchors[-1])):
            if len(self.trail) > 1 and self.distance(x) > THIN * self.distance(self.trail[-2]):
                self.trail.pop()
            self.trail.append(x)
            return x
        answer = yield Ask(x[None], confirming(self.rate))
        self.trail.clear()
        if answer.fooled[0]:
            self.anchors.append(x)
        else:
            self.caution = min(self.caution + 1, len(CAUTION) - 1)
        return self.anchors[-1] if self.anchors else self.image

    def secure(self, x: Array) -> Generator[Ask, Answer, None]:
        """On a random model settle on x as it is, before a search goes on to the boundary, where it may not pass."""
        if not self.deterministic and self.distance(x) < self.reach:
            yield from self.settle(x)

    def finish(self) -> Search:
        """Confirm the closest image of the trail that can be."""
        if self.deterministic:
            self.anchors += self.trail
            return
        for x in reversed(self.trail):
            if self.spent >= self.limit:
                return
            answer = yield Ask(x[None], confirming(self.rate))
            if answer.fooled[0]:
                self.anchors.append(x)
                return


def distances(x: Array, image: Array, norm: str) -> Array:
    """Distances (m,) of x (m, C, H, W) from one image; l0 counts pixels."""
    difference = np.abs(x - image)
    if norm == "l0":
        return np.asarray((difference.max(1) > 0).reshape(len(x), prod(image.shape[1:])).sum(1), np.float64)
    flat = difference.reshape(len(x), image.size)
    return np.asarray(flat.max(1) if norm == "linf" else np.sqrt(np.einsum("ij,ij->i", flat, flat)))


def hunt(subject: Subject, search: Search) -> Search:
    """Leave alone what is wrong already, else search until the budget is spent, then confirm."""
    most, test = subject.limit, confirming(subject.rate)
    if subject.spent >= most:
        return
    answer = yield Ask(subject.image[None], test)
    if answer.fooled[0]:
        subject.wrong_already = True
        return
    # Once there is something to hand over, draws are kept back to confirm what else will be found.
    kept_back = 0 if subject.deterministic else min(CONFIRMATIONS * test.clear, most // 2)
    question = next(search, None)
    while question is not None and subject.spent < subject.limit:
        answer = yield question
        subject.limit = most - kept_back if subject.anchors else most
        try:
            question = search.send(answer)
        except StopIteration:
            break
    search.close()
    subject.limit = most
    yield from subject.finish()


class _Question:
    """What one image's search asks at present, and the draws so far."""

    def __init__(self, row: int, subject: Subject, search: Search) -> None:
        self.row, self.subject, self.search = row, subject, search
        self._answer: Answer | None = None

    def advance(self) -> bool:
        """Hand the answer over and take the next question; False when the search has ended."""
        try:
            self.ask = self.search.send(self._answer) if self._answer else next(self.search)
        except StopIteration:
            return False
        count = len(self.ask.images)
        self._fooled, self._draws, self._margins = np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count)
        self._verdict = np.full(count, -1)
        return True

    def due(self) -> Places:
        """Which of the images get a draw this round, as far as the budget goes."""
        return np.flatnonzero(self._verdict < 0)[: self.subject.limit - self.subject.spent]

    def record(self, rows: Places, fooled: Flags, margins: Array) -> None:
        """Count one draw of the images `rows`."""
        self.subject.spent += len(rows)
        self._fooled[rows] += fooled
        self._draws[rows] += 1
        self._margins[rows] += margins
        test = Majority() if self.subject.deterministic else self.ask.test
        self._verdict[rows] = test.verdicts(self._fooled[rows], self._draws[rows])
        means = np.where(self._draws > 0, self._margins / np.maximum(self._draws, 1), -np.inf)
        self._answer = Answer(self._verdict == 1, means)

    @property
    def over(self) -> bool:
        """Whether everything is decided, or the budget spent: what is undecided then has failed."""
        return bool((self._verdict >= 0).all()) or self.subject.spent >= self.subject.limit


def run(batch: Batch, subjects: list[Subject], searches: list[Search]) -> Tensor:
    """Run all searches to their end; counts queries in the batch. Returns which images met a non-finite logit (N,)."""
    queries = batch.queries.clone()
    open_ = [_Question(row, *pair) for row, pair in enumerate(zip(subjects, searches, strict=True))]
    open_ = [question for question in open_ if question.advance()]
    nonfinite = np.zeros(len(subjects), np.bool_)
    images = batch.images.double()
    while open_:
        due = [question.due() for question in open_]
        places = np.repeat([question.row for question in open_], [len(d) for d in due])
        rows = torch.from_numpy(places).to(batch.images.device)
        asked = torch.from_numpy(np.concatenate([q.ask.images[d] for q, d in zip(open_, due, strict=True)])).to(images)
        # One draw id a round: an image takes part in every round until it is done, so its ids depend on nothing else.
        draw = batch.fresh(1)
        logits = torch.cat(
            [batch.logits(rounded(x, images[r], batch.images.dtype), r, draw)
             for x, r in zip(asked.split(ROWS), rows.split(ROWS), strict=True)]
        )  # fmt: skip
        labels = batch.labels[rows]
        fooled = wrong(logits, labels).cpu().numpy()
        margins = margin(logits.double(), labels).nan_to_num(torch.inf, torch.inf, -torch.inf).cpu().numpy()
        nonfinite[places[~torch.isfinite(logits).all(1).cpu().numpy()]] = True
        cuts = np.cumsum([len(d) for d in due])[:-1]
        for question, d, f, m in zip(open_, due, np.split(fooled, cuts), np.split(margins, cuts), strict=True):
            question.record(d, f, m)
        open_ = [question for question in open_ if not question.over or question.advance()]
    batch.queries[:] = queries + torch.tensor([s.spent for s in subjects], dtype=torch.int64).to(queries)
    return torch.from_numpy(nonfinite).to(batch.images.device)
