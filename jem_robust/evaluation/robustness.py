"""One pass over the epsilons: attack, select, judge. Candidates are carried upward.

PGD on random models goes from the largest eps down: what has not fooled a single select draw at one eps is not tried at
a smaller one, and what fools all of them is drawn to the smallest eps at which it still does. So nearly all images cost
one attack that runs to its end, whatever the number of epsilons. (On deterministic models `Descent` does so.)
"""

import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import asdict, is_dataclass
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jem_robust.evaluation.checks import nonfinite, probe
from jem_robust.evaluation.contest import Contest
from jem_robust.evaluation.curve import RobustnessCurve
from jem_robust.evaluation.levels import Lead, Level, Levels
from jem_robust.evaluation.members import Member, Settled, descending, lowerable, narrowed, resolve, within
from jem_robust.gradients import Spent
from jem_robust.images import check_images, check_labels
from jem_robust.progress import Progress
from jem_robust.reporting.records import versions
from jem_robust_attacks.norms import distance, parse_epsilon, parse_norm, project, whole
from jem_robust_attacks.starts import DecisionAttack
from jem_robust_attacks.target import Target, as_target

ATTACK_IMAGES = 64  # at once,
MOST_IMAGES = 256  # where memory allows and it pays
OnEpsilon = Callable[[RobustnessCurve], None]


def evaluate(
    model: Any, images: Any, labels: Any, norm: str = "linf", epsilons: Sequence[Any] = (0, 2 / 255, 8 / 255),
    attacks: Sequence[Any] = ("pgd",), draws: int = 10, select_draws: int = 10, seed: int = 0,
    batch_size: int | None = None, progress: bool = False, *, attack_chains: int | None = None,
    precision: str = "float32", resume: RobustnessCurve | None = None, on_epsilon: OnEpsilon | None = None,
    expected_work: float | None = None,
) -> RobustnessCurve:  # fmt: skip
    """Robustness curve of a model (a JEMClassifier or any callable images -> logits), judged on fresh draws.

    images (N, C, H, W) in [0, 1], labels (N,). epsilons: in [0, 1] units, numbers or text such as "8/255"; sorted.
    attacks: names or attack objects of the same norm; the per-image worst case counts. select_draws, draws: draws on
    which a candidate is selected and judged (1 for deterministic models). batch_size: images attacked at once by
    gradients and toolkits. attack_chains: chains an attack's draw runs (None: the model's). precision: "float32" or
    "bf16", of attack gradients only; selection and verdicts keep the network's own. resume: a partial curve of the
    same settings.
    on_epsilon: called with the curve so far after each eps. Raises ValueError and TypeError on bad input.
    """
    run = Evaluation(
        model,
        images,
        labels,
        norm,
        epsilons,
        attacks,
        draws,
        select_draws,
        seed,
        batch_size,
        attack_chains,
        precision,
    )
    if resume is not None:
        run.take_up(resume)
    with Progress(expected_work or run.rough_work(), "attack", "rows", show=progress) as bar:
        run.progress = bar
        for eps in run.remaining():
            run.at(eps)
            if on_epsilon is not None:
                on_epsilon(run.curve())
    return run.curve()


class Evaluation:
    """State of an evaluation between epsilons. Image ids are positions."""

    def __init__(
        self, model: Any, images: Any, labels: Any, norm: str, epsilons: Sequence[Any], attacks: Sequence[Any],
        draws: int, select_draws: int, seed: int, batch_size: int | None, attack_chains: int | None,
        precision: str = "float32",
    ) -> None:  # fmt: skip
        self.norm = parse_norm(norm, allowed=("linf", "l2", "l0"))
        self.epsilons = _sizes(epsilons)
        if self.norm == "l0" and any(0 < eps < 1 for eps in self.epsilons):
            raise ValueError(f"expected numbers of pixels as epsilons for l0, got {self.epsilons}: pass e.g. [5, 20]")
        draws, select_draws = whole("draws", draws, 1), whole("select_draws", select_draws, 1)
        batch_size = None if batch_size is None else whole("batch_size", batch_size, 1)
        self.images = check_images(images, getattr(model, "input_shape", None)).detach()
        if len(self.images) == 0:
            raise ValueError("expected at least one image, got none: check the data and the limit")
        self.images = self.images.to(getattr(model, "device", self.images.device)).contiguous()
        self.labels = check_labels(labels, len(self.images), getattr(model, "num_classes", None)).to(self.images.device)
        self.ids = torch.arange(len(self.images), device=self.images.device)
        self.model, self.seed, self.attack_chains = model, seed, attack_chains
        self.target: Target = as_target(model, self.images)
        self.progress = Progress(1, "attack", show=False)
        self._started, self._spent_before = time.monotonic(), copy(self._spent())
        self.checks = probe(self.target, self.images, self.labels, self.ids, seed)
        certain = self.target.deterministic
        self.draws, self.select_draws = (1, 1) if certain else (draws, select_draws)
        # On deterministic models images leave an attack early; a large batch lasts longer before its calls are small.
        affordable = model.affordable_rows(self.images) if certain and hasattr(model, "affordable_rows") else 0
        self.batch_size = batch_size or min(max(ATTACK_IMAGES, affordable), MOST_IMAGES)
        self.precision = precision
        attacked = narrowed(model, precision)
        self.members = descending(resolve(attacks, attacked, self.images, self.norm, attack_chains), self.epsilons)
        self.descends = not certain and lowerable(self.members, self.epsilons)
        chains = getattr(getattr(model, "refinement", None), "independent_chains", 1)
        self.contest = Contest(
            self.target, self.images, self.labels, self.draws, self.select_draws, seed, chains, self._show
        )
        self.bad_gradients = torch.zeros_like(self.contest.bad_logits)
        self.spared = torch.zeros_like(self.bad_gradients)  # what fooled no draw at a larger eps
        self.levels = Levels()
        self._closest: dict[int, Tensor] = {}  # candidates of minimising attacks, found once

    @property
    def all(self) -> Tensor:
        """Rows of all images."""
        return self.ids

    def _spent(self) -> Spent:
        return getattr(self.model, "spent", Spent())

    def remaining(self) -> list[float]:
        """Epsilons still to be done, in the order in which they are."""
        order = sorted(self.epsilons, key=lambda eps: -eps if eps else -inf) if self.descends else self.epsilons
        return order[len(self.levels.done) :]

    def _show(self, _: int = 0) -> None:
        spent = self._spent().since(self._spent_before)
        self.progress.done = spent.forwards + spent.backwards
        self.progress.advance(0)

    def rough_work(self) -> float:
        """Rows the whole evaluation may take; the command line passes a better figure."""
        per_eps = max(1, self.progress.done) * 4
        return float(per_eps * (1 + len(self.epsilons)))

    def at(self, eps: float) -> None:
        """Attack, select and judge at one eps, the next of `remaining`."""
        starts = self._lowered(eps) if self.descends else self.contest.lead.x
        moved = torch.zeros_like(self.bad_gradients)
        attacks: list[dict[str, Any]] = []
        for i, member in enumerate(self.members):
            self.progress.advance(0, description=f"eps {eps:.4g}: {member.name}")
            active = (
                ((self.contest.lead.selected.correct > 0) & ~self.spared).nonzero().squeeze(1)
                if eps > 0
                else self.all[:0]
            )
            for rows in active.split(self.batch_size) if len(active) else ():
                moved[rows] |= self._attack(i, member, eps, rows, starts)
            if self.descends:
                self._reach_down(moved.nonzero().squeeze(1), eps)
            self.contest.judge(moved)
            attacks.append(self._outcome(member, i, len(active)))
        self.levels.add(Level(eps, self.contest.lead.copy(), self.bad_gradients.clone(), attacks))

    def _lowered(self, eps: float) -> Tensor:
        """Come down from a larger eps: leads that are too far start over at the image. Starts of attacks (N, ...)."""
        lead = self.contest.lead
        if any(level.eps > 0 for level in self.levels.done):
            self.spared |= lead.selected.correct == self.select_draws
            self.bad_gradients = torch.zeros_like(self.bad_gradients)
        far = (distance(lead.x, self.images, self.norm) > eps + 1e-9).nonzero().squeeze(1)
        starts = project(lead.x, self.images, eps, self.norm, self.target.bounds)
        lead.follow(far, self.contest.unperturbed)
        return starts

    def _reach_down(self, rows: Tensor, eps: float) -> None:
        """Draw what fools every select draw to the smallest eps at which it still does, by bisection."""
        sizes = torch.tensor([e for e in self.epsilons if 0 < e <= eps], dtype=torch.float64, device=rows.device)
        lead = self.contest.lead
        rows = rows[lead.selected.correct[rows] == 0]
        low, high = torch.zeros_like(rows), torch.full_like(rows, len(sizes) - 1)
        while len(open_ := (low < high).nonzero().squeeze(1)):
            middle, at = (low + high)[open_] // 2, rows[open_]
            nearer = project(lead.x[at], self.images[at], sizes[middle], self.norm, self.target.bounds)
            fooled = self.contest.settle(nearer, at, None)
            high[open_] = torch.where(fooled, middle, high[open_])
            low[open_] = torch.where(fooled, low[open_], middle + 1)

    def _attack(self, i: int, member: Member, eps: float, rows: Tensor, starts: Tensor) -> Tensor:
        """Let one attack improve the leading candidates of some images; which of them it did, (n,) bool."""
        images, seed = self.images[rows], self._attack_seed(i, eps)

        def confirmed(x: Tensor, some: Tensor) -> Tensor:
            x = within(x.float().to(images.dtype), images[some], eps, self.norm, self.target.bounds)
            return self.contest.settle(x, rows[some], i)

        found, bad = self._found(i, member, eps, rows, seed, starts[rows], confirmed)
        self.bad_gradients[rows] |= bad
        settled = self.contest.lead.selected.correct[rows] == 0  # on the way: there is nothing to add
        moved = settled.clone()
        for m in range(found.shape[1]):
            candidate = within(found[:, m], images, eps, self.norm, self.target.bounds)
            new = (candidate != self.contest.lead.x[rows]).flatten(1).any(1) & ~settled
            moved |= self.contest.offer(candidate, rows, new, i)
        return moved

    def _found(
        self, i: int, member: Member, eps: float, rows: Tensor, seed: int, starts: Tensor, settled: Settled
    ) -> tuple[Tensor, Tensor]:
        if not member.minimizes:
            images, labels, ids = self.images[rows], self.labels[rows], self.ids[rows]
            return member.candidates(images, labels, eps, seed, ids, starts, self._show, settled)
        if i not in self._closest:
            # Decision attacks start from images of other classes: from all of them, whatever the batch size.
            size = len(self.all) if isinstance(member.attack, DecisionAttack) else self.batch_size
            parts = [
                member.candidates(self.images[r], self.labels[r], None, seed, self.ids[r], self.images[r], self._show)
                for r in self.all.split(size)
            ]
            self._closest[i] = torch.cat([candidates for candidates, _ in parts])
            self.bad_gradients |= torch.cat([bad for _, bad in parts])
        found, images = self._closest[i][rows], self.images[rows].unsqueeze(1)
        near = (
            torch.stack([distance(found[:, m], images[:, 0], self.norm) for m in range(found.shape[1])], 1)
            <= eps + 1e-6  # what float32 may have added; `within` takes it off
        )
        return torch.where(near.view(*near.shape, 1, 1, 1), found, images), self.bad_gradients[rows]

    def _attack_seed(self, i: int, eps: float) -> int:
        """Noise and starts of an attack differ from eps to eps and attack to attack."""
        word = int(np.float64(eps).view(np.uint64))
        return int(np.random.SeedSequence([self.seed % 2**64, i, word]).generate_state(1, np.uint64)[0])

    def _outcome(self, member: Member, i: int, attacked: int) -> dict[str, Any]:
        lead = self.contest.lead
        broke = (lead.source == i) & (lead.judged <= 0.5)
        # At this eps or one done before, as `broke` counts.
        attacked = max([attacked, *(level.attacks[i]["attacked"] for level in self.levels.done)])
        left = torch.where(self.bad_gradients, 0.0, lead.judged).mean()
        return {"name": member.name, "attacked": attacked, "broke": int(broke.sum()), "accuracy": float(left)}

    def take_up(self, earlier: RobustnessCurve) -> None:
        """Continue after the epsilons of a partial curve. Raises ValueError if its settings differ."""
        done = [float(e) for e in earlier.epsilons]
        due = sorted(self.remaining()[: len(done)])
        mine = (self.norm, self.seed, self.draws, self.select_draws, due, self.labels.tolist())
        theirs = (earlier.norm, earlier.seed, earlier.draws, earlier.select_draws, done, earlier.labels.tolist())
        if mine != theirs:
            raise ValueError("expected a partial result of the same settings, got another: start anew or repeat them")
        for e, row in enumerate(earlier.per_attack):
            x = torch.from_numpy(earlier.adversarials[e]).to(self.images)
            lead = Lead(
                x,
                self.contest.score(x, self.all, "select", range(self.select_draws)),
                torch.from_numpy(earlier.p_correct[e]).to(self.contest.lead.judged),
                torch.tensor(row["source"], device=x.device),
            )
            bad = torch.zeros_like(self.bad_gradients)
            bad[row["nonfinite_gradient"]] = True
            self.levels.done.append(Level(done[e], lead, bad, row["attacks"]))
        if done:
            smallest = next((level for level in self.levels.done if level.eps > 0), self.levels.done[0])
            last = smallest if self.descends else self.levels.done[-1]
            self.contest.lead, self.bad_gradients = last.lead.copy(), last.bad.clone()

    def curve(self) -> RobustnessCurve:
        """The curve over the epsilons done so far."""
        checks = [*self.checks, nonfinite("logit", int(self.contest.bad_logits.sum()))]
        p_correct, adversarials, per_attack = self.levels.results()
        bad = len(per_attack[-1]["nonfinite_gradient"]) if per_attack else 0
        checks.append(nonfinite("gradient", bad))
        done = [level.eps for level in self.levels.done]
        distances = [distance(x, self.images, self.norm) for x in adversarials]
        return RobustnessCurve(
            norm=self.norm, epsilons=np.array(done), clean=self.contest.clean, draws=self.draws,
            select_draws=self.select_draws, seed=self.seed, labels=self.labels.cpu().numpy(),
            p_correct=_stacked(p_correct, (0, len(self.images))).astype(np.float64),
            adversarials=_stacked(adversarials, (0, *self.images.shape)).astype(np.float32),
            distances=_stacked(distances, (0, len(self.images))).astype(np.float64),
            warnings=[check.warning for check in checks if not check.passed],
            checks=[check.record() for check in checks], per_attack=per_attack, about=self._about(),
            complete=len(done) == len(self.epsilons),
        )  # fmt: skip

    def _about(self) -> dict[str, Any]:
        spent = self._spent().since(self._spent_before)
        refinement = getattr(self.model, "refinement", None)
        card = getattr(self.model, "card", None) or {"name": type(self.model).__name__}
        return {
            "model": card,
            "refinement": asdict(refinement) if refinement is not None else None,
            "gradient": getattr(self.model, "gradient", None),
            "attacks": [{"name": m.name, **_settings(getattr(m.attack, "attack", m.attack))} for m in self.members],
            "attack_chains": self.attack_chains,
            "precision": self.precision,
            "seconds": time.monotonic() - self._started,
            "spent": {"forwards": spent.forwards, "backwards": spent.backwards},
            "versions": versions(),
        }


def _sizes(epsilons: Any) -> list[float]:
    if isinstance(epsilons, str | int | float):
        epsilons = [epsilons]
    sizes = sorted(parse_epsilon(e) for e in (epsilons.tolist() if isinstance(epsilons, Tensor) else epsilons))
    if not sizes:
        raise ValueError("expected at least one epsilon, got none: pass e.g. [8/255]")
    return sizes


def _settings(attack: Any) -> dict[str, Any]:
    return asdict(attack) if is_dataclass(attack) and not isinstance(attack, type) else {"settings": repr(attack)}


def _stacked(parts: list[Tensor], empty: tuple[int, ...]) -> Any:
    return torch.stack(parts).cpu().numpy() if parts else np.zeros(empty)
