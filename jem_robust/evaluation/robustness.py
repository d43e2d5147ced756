"""One pass over increasing epsilons: attack, select, judge; candidates are carried upward."""

import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import asdict, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jem_robust.evaluation.checks import nonfinite, probe
from jem_robust.evaluation.curve import RobustnessCurve
from jem_robust.evaluation.members import Member, descending, narrowed, resolve, within
from jem_robust.evaluation.verdict import Score, score
from jem_robust.gradients import Spent
from jem_robust.images import check_images, check_labels
from jem_robust.progress import Progress
from jem_robust.reporting.records import versions
from jem_robust_attacks.norms import distance, parse_epsilon, parse_norm, whole
from jem_robust_attacks.starts import DecisionAttack
from jem_robust_attacks.target import Target, as_target

SCORE_ROWS = 512  # draws scored in one call, fewer where images are large:
SCORE_VALUES = 2**26  # pixel values of all their chains together
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
        for eps in run.epsilons[len(run.p_correct) :]:
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
        self.best = self.images.clone()
        self.selected = self._score(self.images, self.all, "select", self.select_draws)
        judged = self._score(self.images, self.all, "judge", self.draws)
        self.judged = judged.correct.double() / self.draws
        self.clean = float(self.judged.mean())
        self.bad_logits = self.selected.nonfinite | judged.nonfinite
        self.bad_gradients = torch.zeros_like(self.bad_logits)
        self.source = torch.full_like(self.labels, -1)  # member whose candidate leads; -1: the clean image
        self.p_correct: list[Tensor] = []
        self.adversarials: list[Tensor] = []
        self.per_attack: list[dict[str, Any]] = []
        self._closest: dict[int, Tensor] = {}  # candidates of minimising attacks, found once

    @property
    def all(self) -> Tensor:
        """Rows of all images."""
        return self.ids

    def _spent(self) -> Spent:
        return getattr(self.model, "spent", Spent())

    def _score(self, x: Tensor, rows: Tensor, purpose: str, draws: int) -> Score:
        chains = getattr(getattr(self.model, "refinement", None), "independent_chains", 1)
        batch = max(1, min(SCORE_ROWS, SCORE_VALUES // (chains * self.images[0].numel())))
        result = score(self.target, x, self.labels[rows], self.ids[rows], draws, purpose, self.seed, batch)
        self._show()
        return result

    def _show(self, _: int = 0) -> None:
        spent = self._spent().since(self._spent_before)
        self.progress.done = spent.forwards + spent.backwards
        self.progress.advance(0)

    def rough_work(self) -> float:
        """Rows the whole evaluation may take; the command line passes a better figure."""
        per_eps = max(1, self.progress.done) * 4
        return float(per_eps * (1 + len(self.epsilons)))

    def at(self, eps: float) -> None:
        """Attack, select and judge at one eps, which must not be smaller than the last."""
        moved = torch.zeros_like(self.bad_logits)
        row: dict[str, Any] = {"eps": eps, "attacks": []}
        for i, member in enumerate(self.members):
            self.progress.advance(0, description=f"eps {eps:.4g}: {member.name}")
            active = (self.selected.correct > 0).nonzero().squeeze(1) if eps > 0 else self.all[:0]
            for rows in active.split(self.batch_size):
                moved[rows] |= self._attack(i, member, eps, rows)
            self._judge(moved)
            row["attacks"].append(self._outcome(member, i, len(active)))
        p = torch.where(self.bad_gradients, 0.0, self.judged) if eps > 0 else self.judged
        self.p_correct.append(p.clone())
        self.adversarials.append(self.best.clone())
        row["source"] = self.source.tolist()
        row["nonfinite_gradient"] = self.bad_gradients.nonzero().squeeze(1).tolist()
        self.per_attack.append(row)

    def _attack(self, i: int, member: Member, eps: float, rows: Tensor) -> Tensor:
        """Let one attack improve the leading candidates of some images; which of them it did, (n,) bool."""
        images, seed = self.images[rows], self._attack_seed(i, eps)
        found, bad = self._found(i, member, eps, rows, seed)
        self.bad_gradients[rows] |= bad
        moved = torch.zeros_like(bad)
        for m in range(found.shape[1]):
            candidate = within(found[:, m], images, eps, self.norm, self.target.bounds)
            new = (candidate != self.best[rows]).flatten(1).any(1).nonzero().squeeze(1)
            if len(new) == 0:
                continue
            scored = self._score(candidate[new], rows[new], "select", self.select_draws)
            self.bad_logits[rows[new]] |= scored.nonfinite
            better = scored.worse_than(self.selected.rows(rows[new]))
            winners = new[better]
            self.best[rows[winners]] = candidate[winners]
            self.selected.update(rows[winners], scored.rows(better.nonzero().squeeze(1)))
            self.source[rows[winners]] = i
            moved[winners] = True
        return moved

    def _found(self, i: int, member: Member, eps: float, rows: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        if not member.minimizes:
            images, labels, ids = self.images[rows], self.labels[rows], self.ids[rows]
            return member.candidates(images, labels, eps, seed, ids, self.best[rows], self._show)
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

    def _judge(self, moved: Tensor) -> None:
        """Judge images whose leading candidate changed; the others' verdict stands, the draws being the same."""
        rows = moved.nonzero().squeeze(1)
        if len(rows):
            result = self._score(self.best[rows], rows, "judge", self.draws)
            self.judged[rows] = result.correct.double() / self.draws
            self.bad_logits[rows] |= result.nonfinite
            moved[rows] = False

    def _outcome(self, member: Member, i: int, attacked: int) -> dict[str, Any]:
        broke = (self.source == i) & (self.judged <= 0.5)
        # At this or a smaller eps, as `broke` counts: what an attack is run on only shrinks from eps to eps.
        attacked = max([attacked, *(row["attacks"][i]["attacked"] for row in self.per_attack)])
        left = torch.where(self.bad_gradients, 0.0, self.judged).mean()
        return {"name": member.name, "attacked": attacked, "broke": int(broke.sum()), "accuracy": float(left)}

    def take_up(self, earlier: RobustnessCurve) -> None:
        """Continue after the epsilons of a partial curve. Raises ValueError if its settings differ."""
        done = [float(e) for e in earlier.epsilons]
        mine = (self.norm, self.seed, self.draws, self.select_draws, self.epsilons[: len(done)], self.labels.tolist())
        theirs = (earlier.norm, earlier.seed, earlier.draws, earlier.select_draws, done, earlier.labels.tolist())
        if mine != theirs:
            raise ValueError("expected a partial result of the same settings, got another: start anew or repeat them")
        self.p_correct = [torch.from_numpy(p).to(self.judged) for p in earlier.p_correct]
        self.adversarials = [torch.from_numpy(a).to(self.images) for a in earlier.adversarials]
        self.per_attack = list(earlier.per_attack)
        if done:
            self.best, self.judged = self.adversarials[-1].clone(), self.p_correct[-1].clone()
            self.source = torch.tensor(earlier.per_attack[-1]["source"], device=self.source.device)
            self.bad_gradients[earlier.per_attack[-1]["nonfinite_gradient"]] = True
            self.selected = self._score(self.best, self.all, "select", self.select_draws)

    def curve(self) -> RobustnessCurve:
        """The curve over the epsilons done so far."""
        checks = [*self.checks, nonfinite("logit", int(self.bad_logits.sum()))]
        checks.append(nonfinite("gradient", int(self.bad_gradients.sum())))
        done = self.epsilons[: len(self.p_correct)]
        distances = [distance(x, self.images, self.norm) for x in self.adversarials]
        return RobustnessCurve(
            norm=self.norm, epsilons=np.array(done), clean=self.clean, draws=self.draws,
            select_draws=self.select_draws, seed=self.seed, labels=self.labels.cpu().numpy(),
            p_correct=_stacked(self.p_correct, (0, len(self.images))).astype(np.float64),
            adversarials=_stacked(self.adversarials, (0, *self.images.shape)).astype(np.float32),
            distances=_stacked(distances, (0, len(self.images))).astype(np.float64),
            warnings=[check.warning for check in checks if not check.passed],
            checks=[check.record() for check in checks], per_attack=list(self.per_attack), about=self._about(),
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
