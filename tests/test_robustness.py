import copy
import json

import numpy as np
import pytest
import torch
from torch import nn

import jem_robust as jr
from jem_robust.evaluation.members import Transfer
from jem_robust_attacks import PGD, AttackResult
from tests.worlds import CLASSES, LinearNet, NoisyNet, images, quick, smooth_cnn

EPS = [0, 0.02, 0.05, 0.1]


def linear_world(classes, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(classes, 48, generator=generator, dtype=torch.float64)
    x = 0.3 + 0.4 * torch.rand(120, 3, 4, 4, generator=generator, dtype=torch.float64)
    y = (x.flatten(1) @ weight.T).argmax(1)
    y[:6] = (y[:6] + 1) % classes  # wrong from the start
    return (lambda im: im.flatten(1) @ weight.T), weight, x, y


def robust_in_closed_form(weight, x, y, eps, norm):
    """No class overtakes within eps; x keeps .3 from the box, further than any eps used here."""
    z = x.flatten(1) @ weight.T
    towards = weight[None] - weight[y][:, None]
    reach = eps * (towards.abs().sum(2) if norm == "linf" else towards.norm(dim=2))
    overtakes = (z - z.gather(1, y[:, None]) + reach >= 0).scatter(1, y[:, None], False)
    return ~overtakes.any(1)


@pytest.mark.parametrize("classes", [2, 10])
@pytest.mark.parametrize(("norm", "scale"), [("linf", 1.0), ("l2", 6.0)])
def test_a_linear_classifiers_accuracy_is_known_to_the_last_image(classes, norm, scale):
    for seed in range(3):
        model, weight, x, y = linear_world(classes, seed)
        epsilons = [scale * e for e in (0, 0.003, 0.01, 0.02, 0.04)]
        curve = jr.evaluate(model, x, y, norm, epsilons, attacks=["pgd"])
        expected = torch.stack([robust_in_closed_form(weight, x, y, e, norm) for e in epsilons])
        np.testing.assert_array_equal(curve.p_correct, expected.double().numpy())
        assert curve.clean == pytest.approx(114 / 120)
        assert curve.draws == 1


def noisy_model(seed=0, **changes):
    """Steep logits and much noise: single draws flip."""
    return jr.JEMClassifier(smooth_cnn(), quick(steps=1, noise=2.0, chains=1, **changes), seed=seed)


def labelled(model, n=40):
    x = images(n, seed=3)
    return x, model.with_refinement(steps=0)(x).argmax(1)


def test_retrying_without_a_perturbation_gains_nothing():
    model = noisy_model()
    x, y = labelled(model)
    attack = PGD(steps=2, restarts=20, eot=1)
    curve = jr.evaluate(model, x, y, "linf", [0, 1e-6], attacks=[attack], draws=40)
    assert 0.3 < curve.clean < 0.95  # noise that a lucky draw could exploit
    assert abs(curve.raw[1] - curve.clean) < 0.05
    assert curve.raw[0] == curve.clean


def test_images_wrong_from_the_start_are_not_robust_and_stay_untouched():
    model, _, x, y = linear_world(5, 0)
    curve = jr.evaluate(model, x, y, "linf", [0.0, 0.01])
    assert not curve.p_correct[:, :6].any()
    np.testing.assert_array_equal(curve.adversarials[:, :6], np.repeat(x[None, :6].float().numpy(), 2, 0))


class Bad(nn.Module):
    """Wrong in one image in two: logits of those below .5 are `value`."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        logits = torch.stack([x.flatten(1).sum(1), -x.flatten(1).sum(1)], 1)
        return torch.where(x[:, :1, 0, 0] < 0.5, torch.full_like(logits, self.value), logits)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_logits_are_never_robust_and_reported(value):
    x = images(20, dtype=torch.float32)
    bad = x[:, 0, 0, 0] < 0.5
    for model in (Bad(value), jr.JEMClassifier(Bad(value), jr.Refinement(steps=0), input_range=(0, 1))):
        curve = jr.evaluate(model, x, [0] * 20, "linf", [0, 1e-4])
        assert curve.clean == pytest.approx(1 - float(bad.double().mean()))
        assert not curve.p_correct[:, bad.numpy()].any()
        assert any("not finite" in text for text in curve.warnings)


def test_non_finite_gradients_are_never_robust_and_reported():
    def model(x):
        s = x.flatten(1).sum(1) + 0 * (x - x.detach()).flatten(1).sum(1).sqrt()
        return torch.stack([s, -s], 1)

    x = images(5)
    curve = jr.evaluate(model, x, [0] * 5, "linf", [0, 1e-4])
    assert curve.raw.tolist() == [1.0, 0.0]
    assert any("gradient" in text for text in curve.warnings)


def test_candidates_are_carried_so_accuracy_never_rises():
    model = jr.JEMClassifier(smooth_cnn(), quick())
    x, y = labelled(model)
    curve = jr.evaluate(model, x, y, "linf", EPS[::-1], attacks=[PGD(steps=3, eot=1)], draws=6, select_draws=6)
    assert curve.epsilons.tolist() == sorted(EPS)
    assert (np.diff(curve.accuracy) <= 1e-12).all()
    assert (curve.low <= curve.accuracy).all()
    assert (curve.accuracy <= curve.high).all()
    assert curve.accuracy[-1] < curve.accuracy[0]
    assert (curve.distances <= curve.epsilons[:, None] + 1e-6).all()


def test_two_runs_with_one_seed_are_identical_and_others_differ():
    model = jr.JEMClassifier(smooth_cnn(), quick(noise=0.3))
    x, y = labelled(model, 12)
    state = torch.get_rng_state()
    runs = [jr.evaluate(model, x, y, "l2", [0, 0.3], ["pgd"], 4, 4, seed=s) for s in (0, 0, 1)]
    assert torch.equal(state, torch.get_rng_state())
    np.testing.assert_array_equal(runs[0].adversarials, runs[1].adversarials)
    np.testing.assert_array_equal(runs[0].p_correct, runs[1].p_correct)
    assert not np.array_equal(runs[0].adversarials, runs[2].adversarials)


def test_batch_size_changes_nothing_in_float64():
    model = jr.JEMClassifier(smooth_cnn(), quick(noise=0.3))
    x, y = labelled(model, 20)
    runs = [jr.evaluate(model, x, y, "linf", [0, 0.05], ["pgd"], 4, 4, batch_size=b) for b in (7, 64)]
    np.testing.assert_array_equal(runs[0].p_correct, runs[1].p_correct)
    np.testing.assert_allclose(runs[0].adversarials, runs[1].adversarials, atol=1e-6)


def test_nothing_of_the_model_or_the_callers_tensors_changes():
    network = smooth_cnn().train()
    model = jr.JEMClassifier(network, quick())
    x, y = labelled(model, 6)
    model.reseed(5)
    before = copy.deepcopy(network.state_dict())
    kept_x, kept_y = x.clone(), y.clone()
    jr.evaluate(model, x, y, "linf", [0.05], [Transfer(PGD(steps=2)), PGD(steps=2)], 2, 2)
    assert torch.equal(x, kept_x)
    assert torch.equal(y, kept_y)
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())
    assert all(m.training for m in network.modules())
    assert all(p.grad is None and p.requires_grad for p in network.parameters())
    assert torch.equal(model(x), jr.JEMClassifier(network, quick(), seed=5)(x))  # the plain stream stayed put


def test_several_attacks_give_the_per_image_worst_case_and_say_what_each_broke():
    model, _, x, y = linear_world(5, 1)

    class Useless:
        norm, name = "linf", "useless"

        def __call__(self, target, images, labels, eps, seed, image_ids, starts, progress):
            n = len(images)
            failed = torch.zeros(n, dtype=torch.bool)
            return AttackResult(images, torch.full((n,), torch.inf), failed, torch.ones(n, dtype=torch.int64))

    both = jr.evaluate(model, x, y, "linf", [0.01], [Useless(), PGD(steps=10)])
    alone = jr.evaluate(model, x, y, "linf", [0.01], [PGD(steps=10)])
    np.testing.assert_array_equal(both.p_correct, alone.p_correct)
    rows = both.per_attack[0]["attacks"]
    assert [row["name"] for row in rows] == ["useless", "pgd"]
    assert rows[0]["broke"] == 0
    assert rows[0]["accuracy"] == pytest.approx(both.clean)
    assert rows[1]["broke"] == round(120 * (both.clean - both.raw[0]))


def test_a_foreign_attack_that_leaves_ball_or_box_is_brought_back():
    class Wild:
        norm = "linf"

        def __call__(self, target, images, labels, eps, seed, image_ids, starts, progress):
            n = len(images)
            return AttackResult(images + 7, torch.ones(n), torch.ones(n, dtype=torch.bool), torch.ones(n).long())

    model, _, x, y = linear_world(3, 2)
    curve = jr.evaluate(model, x, y, "linf", [0.03], [Wild()])
    assert curve.distances.max() <= 0.03 + 1e-6


def test_transfer_attacks_the_network_itself_and_is_judged_behind_the_refinement():
    model = jr.JEMClassifier(smooth_cnn(), quick(steps=3, noise=0.1))
    x, y = labelled(model, 20)
    curve = jr.evaluate(model, x, y, "linf", [0, 0.1], ["transfer"], 10, 10)
    assert curve.per_attack[1]["attacks"][0]["name"] == "transfer"
    assert curve.accuracy[1] < curve.accuracy[0]
    with pytest.raises(ValueError, match="without refinement"):
        jr.evaluate(lambda z: z.flatten(1)[:, :3], x, y, "linf", [0.1], ["transfer"])


def test_a_globally_noisy_network_is_judged_on_independent_draws():
    model, x = jr.JEMClassifier(NoisyNet(), jr.Refinement(steps=0)), images(6)
    with pytest.warns(UserWarning, match="global random"):
        result = PGD(steps=1)(model, x, [0] * 6, eps=0.01)
    assert (result.queries > 10).all()  # known to be random from the first step on
    curve = jr.evaluate(model, x, model(x).argmax(1), "linf", [0], draws=20)
    assert curve.draws == 20


def test_probabilities_and_zero_gradients_are_warned_of():
    x = images(8)
    soft = jr.evaluate(lambda z: z.flatten(1)[:, :3].softmax(1), x, [0] * 8, "linf", [0])
    assert any("probabilities" in text for text in soft.warnings)
    flat = jr.evaluate(lambda z: (z.flatten(1)[:, :3] * 4).round() + 0 * z.flatten(1)[:, :3], x, [0] * 8, "linf", [0])
    assert any("zero" in text for text in flat.warnings)
    sound = jr.evaluate(lambda z: z.flatten(1)[:, :3], x, [0] * 8, "linf", [0])
    assert sound.warnings == []


def test_epsilons_may_be_one_number_text_or_a_tensor():
    model, _, x, y = linear_world(3, 0)
    for epsilons in (0.01, "0.01", [0.01], np.array([0.01]), torch.tensor([0.01], dtype=torch.float64)):
        assert jr.evaluate(model, x, y, epsilons=epsilons).epsilons.tolist() == [0.01]
    with pytest.raises(TypeError, match="make an object"):
        jr.evaluate(model, x, y, attacks=[PGD])
    two = jr.evaluate(model, x, y, epsilons=[0.01], attacks=["pgd", "pgd"], seed=-1)
    assert [a["name"] for a in two.per_attack[0]["attacks"]] == ["pgd", "pgd 2"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "l7"}, "norm"),
        ({"epsilons": ["8/0"]}, "epsilon"),
        ({"epsilons": [float("nan")]}, "epsilon"),
        ({"epsilons": [-1]}, "epsilon"),
        ({"attacks": ["pgdd"]}, "did you mean pgd"),
        ({"attacks": []}, "list of attacks"),
        ({"epsilons": []}, "at least one epsilon"),
        ({"draws": 2.5}, "whole number"),
        ({"batch_size": 0}, "batch_size"),
        ({"attacks": [PGD(norm="l2")]}, "one norm"),
        ({"draws": 0}, "draws"),
        ({"labels": [0] * 3}, "labels"),
        ({"labels": [CLASSES] * 4}, "labels from 0"),
        ({"images": images(4) * 255}, "rescale"),
        ({"images": images(4) * float("nan")}, "NaN"),
        ({"images": images(4)[:0], "labels": []}, "at least one image"),
        ({"images": images(4)[:, 0]}, "shape"),
    ],
)
def test_bad_input_is_refused_with_a_remedy(changes, message):
    arguments = {"images": images(4), "labels": [0] * 4, "norm": "linf", "epsilons": [0.1], **changes}
    with pytest.raises(ValueError, match=message):
        jr.evaluate(jr.JEMClassifier(LinearNet(), quick()), **arguments)
    with pytest.raises(TypeError, match="divide by 255"):
        jr.evaluate(jr.JEMClassifier(LinearNet(), quick()), (images(4) * 255).to(torch.uint8), [0] * 4)


def test_a_curve_survives_saving_and_its_files_keep_their_promises(tmp_path):
    model = jr.JEMClassifier(smooth_cnn(), quick())
    x, y = labelled(model, 6)
    curve = jr.evaluate(model, x, y, "l2", [0, 0.2], [PGD("l2", steps=2)], 4, 4)
    paths = curve.save(tmp_path / "new" / "folder")
    assert [p.name for p in paths] == ["result.json", "adversarials.npz", "curve.png"]
    loaded = jr.RobustnessCurve.load(tmp_path / "new" / "folder")
    for name in ("epsilons", "accuracy", "low", "high", "raw", "p_correct", "distances", "adversarials", "labels"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(curve, name))
    assert (loaded.clean, loaded.n, loaded.warnings) == (curve.clean, curve.n, curve.warnings)
    record = json.loads((tmp_path / "new/folder/result.json").read_text())
    assert {"epsilons", "accuracy", "raw", "low", "high", "clean", "n", "norm", "seed", "warnings"} <= set(record)
    with np.load(tmp_path / "new/folder/adversarials.npz") as saved:
        assert saved["images"].dtype == np.float32
        assert saved["images"].shape == (2, 6, 1, 5, 5)
        moved = np.sqrt(((saved["images"][1].astype(float) - x.numpy()) ** 2).sum((1, 2, 3)))
        assert (moved <= 0.2 + 1e-6).all()
        assert saved["images"].min() >= 0
        assert saved["images"].max() <= 1
        np.testing.assert_array_equal(saved["images"][0], x.float().numpy())


def test_an_interrupted_evaluation_goes_on_where_it_stopped(tmp_path):
    model = jr.JEMClassifier(smooth_cnn(), quick())
    x, y = labelled(model, 10)
    arguments = {"norm": "linf", "epsilons": EPS, "attacks": [PGD(steps=2, eot=1)], "draws": 4, "select_draws": 4}
    whole = jr.evaluate(model, x, y, **arguments)

    def stop(curve):
        curve.save(tmp_path)
        if len(curve.epsilons) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        jr.evaluate(model, x, y, **arguments, on_epsilon=stop)
    partial = jr.RobustnessCurve.load(tmp_path)
    assert not partial.complete
    resumed = jr.evaluate(model, x, y, **arguments, resume=partial)
    assert resumed.complete
    np.testing.assert_array_equal(resumed.p_correct, whole.p_correct)
    np.testing.assert_allclose(resumed.adversarials, whole.adversarials, atol=1e-6)
    assert resumed.per_attack == whole.per_attack
    with pytest.raises(ValueError, match="same settings"):
        jr.evaluate(model, x, y, **{**arguments, "draws": 5}, resume=partial)
