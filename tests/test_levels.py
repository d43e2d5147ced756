"""Random models are attacked from the largest eps down: known answers, less work, nothing lost."""

import numpy as np
import pytest
import torch

import jem_robust as jr
from jem_robust.evaluation import robustness
from jem_robust.evaluation.levels import Lead, Level, Levels
from jem_robust.evaluation.verdict import Score
from jem_robust_attacks import PGD
from jem_robust_attacks.norms import distance

EPSILONS = [0.01, 0.02, 0.03, 0.04, 0.06, 0.08]


class Noisy:
    """Two classes apart by w x + b + noise * xi, xi keyed by image, draw and purpose; counts gradients (rows)."""

    bounds, deterministic = (0.0, 1.0), False

    def __init__(self, n=24, noise=0.02, features=16):
        generator = torch.Generator().manual_seed(1)
        self.weight = torch.randn(features, generator=generator, dtype=torch.float64)
        x = 0.3 + 0.4 * torch.rand(n, 1, 4, features // 4, generator=generator, dtype=torch.float64)
        self.noise, self.bias, self.gradients, self.asked = noise, 0.1 - (x.flatten(1) @ self.weight).median(), 0, []
        value = x.flatten(1) @ self.weight + self.bias
        self.images, self.labels = x, (value > 0).long()
        self.margins = value.abs() / self.weight.abs().sum()  # eps (linf) at which half the draws are fooled

    def draw(self, images, image_ids, draw_ids, purpose, seed):
        if torch.is_grad_enabled() and images.requires_grad:
            self.gradients += len(images)
        self.asked.append((purpose, image_ids.tolist(), draw_ids.tolist()))
        word = 1000 * ["plain", "frozen", "start", "attack", "select", "judge"].index(purpose)
        noise = [
            np.random.default_rng([seed % 2**32, word, int(i), int(d)]).standard_normal()
            for i, d in zip(image_ids, draw_ids, strict=True)
        ]
        value = images.flatten(1) @ self.weight + self.bias + self.noise * torch.tensor(noise)
        return torch.stack([-value, value], 1)


def evaluated(model, epsilons=EPSILONS, **settings):
    attack = PGD(steps=10, eot=1, **settings)
    return jr.evaluate(model, model.images, model.labels, "linf", epsilons, [attack], draws=20, select_draws=8)


def test_each_image_falls_at_the_eps_that_its_margin_says():
    model = Noisy()
    curve = evaluated(model)
    spread = 3 * model.noise / float(model.weight.abs().sum())
    for e, eps in enumerate(EPSILONS):
        for i, margin in enumerate(model.margins.tolist()):
            if eps < margin - spread:
                assert curve.p_correct[e, i] == 1
            if eps > margin + spread:
                assert curve.p_correct[e, i] <= 0.1  # wrong in all select draws may be right in one of more
    assert (curve.distances <= np.array(EPSILONS)[:, None] + 1e-6).all()
    assert (np.diff(curve.raw) <= 0).all()


def test_work_does_not_grow_with_the_number_of_epsilons_nor_does_the_curve_change():
    gradients, curves = [], []
    for epsilons in (EPSILONS, np.linspace(0.002, 0.08, 40)):
        model = Noisy()
        curves.append(evaluated(model, epsilons, targets=0))
        gradients.append(model.gradients / len(model.images))
    assert gradients[0] < 10 * 2.2  # level by level it could be 10 * 6
    assert gradients[1] < 10 * 5  # some are tried at every eps at which some draws are fooled
    at = [int(np.abs(curves[1].epsilons - eps).argmin()) for eps in EPSILONS]
    np.testing.assert_allclose(curves[0].raw, curves[1].raw[at], atol=2 / 24)


def test_same_curve_as_one_attack_after_another(monkeypatch):
    model = jr.load_model("jem-fashion-mnist", steps=2).with_refinement(chains=1)
    images, labels = jr.load_images("fashion-mnist", limit=12)
    curves, spent = [], []
    for lowered in (True, False):
        if not lowered:
            monkeypatch.setattr(robustness, "lowerable", lambda members, epsilons: False)
        before = model.spent.backwards
        attacks = ["transfer", PGD(steps=6, eot=1)]
        curves.append(jr.evaluate(model, images, labels, "linf", EPSILONS, attacks, draws=6, select_draws=6))
        spent.append(model.spent.backwards - before)
    assert np.abs(curves[0].raw - curves[1].raw).max() <= 1.5 / 12
    assert spent[0] < 0.75 * spent[1]
    assert [row["eps"] for row in curves[0].per_attack] == EPSILONS


def test_what_leaves_an_attack_early_is_wrong_in_all_select_draws(monkeypatch):
    left = []
    settle = robustness.Contest.settle

    def spied(contest, x, rows, source):
        won = settle(contest, x, rows, source)
        if source is not None:
            left.extend(rows[won].tolist())
            full = contest.score(x[won], rows[won], "select", contest.select_draws)
            assert (full.correct == 0).all()
            assert torch.equal(full.correct, contest.lead.selected.correct[rows[won]])
            torch.testing.assert_close(full.margin, contest.lead.selected.margin[rows[won]])
        return won

    monkeypatch.setattr(robustness.Contest, "settle", spied)
    model = Noisy(noise=0.3)
    evaluated(model)
    assert len(left) > 5


def test_an_image_that_no_draw_was_fooled_on_is_not_tried_at_smaller_eps():
    model = Noisy(n=6, noise=1e-4)
    largest = float(model.margins.min()) / 2
    attacked = []
    search = PGD.search

    def spied(attack, target, images, labels, eps, seed, ids, *rest, **more):
        attacked.append((float(eps), ids.tolist()))
        return search(attack, target, images, labels, eps, seed, ids, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PGD, "search", spied)
        evaluated(model, [largest / 2, largest])
    assert attacked == [(largest, [0, 1, 2, 3, 4, 5])]


@pytest.mark.parametrize("zero", [[], [0]])
@pytest.mark.parametrize("stop_after", [1, 3])
def test_an_interrupted_run_goes_on_from_what_it_has(stop_after, zero):
    parts = []

    def stop(curve):
        parts.append(curve)
        if len(curve.epsilons) == stop_after:
            raise KeyboardInterrupt

    epsilons = zero + EPSILONS
    whole = evaluated(Noisy(noise=0.3), epsilons)
    model, attack = Noisy(noise=0.3), PGD(steps=10, eot=1)
    arguments = (model.images, model.labels, "linf", epsilons, [attack], 20, 8)
    with pytest.raises(KeyboardInterrupt):
        jr.evaluate(model, *arguments, on_epsilon=stop)
    assert parts[-1].epsilons.tolist() == zero + EPSILONS[len(EPSILONS) - stop_after + len(zero) :]
    resumed = jr.evaluate(model, *arguments, resume=parts[-1])
    np.testing.assert_array_equal(resumed.p_correct, whole.p_correct)
    np.testing.assert_allclose(resumed.adversarials, whole.adversarials, atol=1e-6)
    assert resumed.per_attack == whole.per_attack


def lead(correct, source):
    n = len(correct)
    selected = Score(torch.tensor(correct), torch.zeros(n).double(), torch.zeros(n, dtype=torch.bool))
    x = torch.full((n, 1, 1, 1), float(source))
    return Lead(x, selected, torch.tensor(correct).double() / 4, torch.full((n,), source))


def test_what_is_found_at_a_smaller_eps_leads_at_larger_ones_where_it_is_better():
    levels = Levels()
    none = torch.zeros(3, dtype=torch.bool)
    record = {"name": "pgd", "attacked": 3, "broke": 0, "accuracy": 1.0}
    levels.add(Level(0.2, lead([4, 2, 0], 1), none, [record]))
    levels.add(Level(0.1, lead([3, 3, 0], 0), torch.tensor([False, False, True]), [record]))
    p_correct, adversarials, rows = levels.results()
    assert [row["eps"] for row in rows] == [0.1, 0.2]
    assert [p.tolist() for p in p_correct] == [[0.75, 0.75, 0.0], [0.75, 0.5, 0.0]]
    assert [row["source"] for row in rows] == [[0, 0, 0], [0, 1, 1]]
    assert adversarials[1].flatten().tolist() == [0.0, 1.0, 1.0]
    assert [row["nonfinite_gradient"] for row in rows] == [[2], [2]]  # of 0.1, so at 0.2 as well
    assert rows[1]["attacks"][0]["accuracy"] == pytest.approx(1.25 / 3)


def test_decision_attacks_and_custom_ones_go_upward():
    class Own(PGD):
        pass

    model = jr.load_model("jem-fashion-mnist", steps=1)
    x = torch.rand(2, 1, 28, 28)
    for attacks, expected in ((["transfer", "pgd"], True), (["pgd", "square"], False), ([Own()], False)):
        members = robustness.resolve(attacks, model, x, "linf", None)
        assert robustness.lowerable(members, EPSILONS) is expected
        assert not robustness.lowerable(members, [0, 0.1])


def test_leads_stay_within_every_ball():
    model = Noisy(noise=0.3)
    curve = evaluated(model)
    for e, eps in enumerate(EPSILONS):
        reached = distance(torch.from_numpy(curve.adversarials[e]), model.images, "linf")
        assert (reached <= eps + 1e-6).all()
