import copy
import math
import pickle
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from torch import nn

import jem_robust as jr
from jem_robust.classifier import JEMClassifier
from jem_robust.langevin import Refinement
from tests.worlds import (
    CLASSES,
    SHAPE,
    GaussianEnergy,
    GaussianNet,
    LinearNet,
    NoisyNet,
    NormedNet,
    images,
    leaky_cnn,
    quick,
    smooth_cnn,
)  # fmt: skip

AGGREGATES = ("logits", "probabilities", "vote")


def jem(network=None, seed=0, **changes):
    return JEMClassifier(network or smooth_cnn(), quick(**changes), seed=seed)


def draw(model, x, ids=None, draws=0, purpose="judge", seed=0):
    ids = torch.arange(len(x)) if ids is None else torch.as_tensor(ids)
    return model.draw(x, ids, torch.full_like(ids, draws), purpose, seed)


# What it computes


def test_the_public_names_and_defaults():
    model = jr.JEMClassifier(smooth_cnn())
    assert isinstance(model, nn.Module)
    assert model.refinement == jr.Refinement()
    assert (model.input_range, model.aggregate, model.gradient, model.seed) == ((-1.0, 1.0), "logits", "exact", 0)
    assert model.bounds == (0.0, 1.0)
    assert "steps=10" in repr(model)


def test_logits_are_the_mean_over_the_chains_of_refine():
    model, x = jem(), images(4)
    with model.frozen_noise(1):
        logits, states = model(x), model.refine(x)
    assert logits.shape == (4, CLASSES)
    assert states.shape == (4, 3, *SHAPE)
    by_hand = model.network(2 * states.flatten(0, 1) - 1).reshape(4, 3, CLASSES).mean(1)
    torch.testing.assert_close(logits, by_hand.detach())


@pytest.mark.parametrize("how", AGGREGATES)
def test_aggregates_by_hand(how):
    model = JEMClassifier(smooth_cnn(), quick(noise=1.0), aggregate=how)
    x = images(6)
    with model.frozen_noise(1):
        got, states = model(x), model.refine(x)
    chains = model.network(2 * states.flatten(0, 1) - 1).reshape(6, 3, CLASSES).detach()
    votes = nn.functional.one_hot(chains.argmax(2), CLASSES).double().mean(1)
    expected = {"logits": chains.mean(1), "probabilities": chains.softmax(2).mean(1), "vote": votes}[how]
    torch.testing.assert_close(got if how == "logits" else got.exp(), expected)
    assert torch.isfinite(got).all()


def test_attacks_on_the_vote_differentiate_the_mean_logits():
    x = images(3).requires_grad_()
    model = jem()
    vote = JEMClassifier(model.network, model.refinement, aggregate="vote")
    with model.frozen_noise(0), vote.frozen_noise(0):
        (expected,) = torch.autograd.grad(model(x)[:, 1].sum(), x)
        (got,) = torch.autograd.grad(vote(x)[:, 1].sum(), x)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("how", AGGREGATES)
def test_nan_in_one_chain_is_never_a_class(how):
    class Sometimes(GaussianNet):
        def forward(self, x):
            logits = super().forward(x).clone()
            logits[1::7, 0] = torch.nan
            return logits

    model = JEMClassifier(Sometimes(), Refinement(steps=0, init_noise=0.1), aggregate=how)
    out = model(images(3))
    assert not torch.isfinite(out[0]).all()
    assert torch.isfinite(out[2]).all()


def test_densities_are_those_of_the_unrefined_image():
    model, x, y = jem(), images(4), torch.tensor([0, 1, 2, 0])
    logits = model.network(2 * x - 1).detach()
    torch.testing.assert_close(model.log_px(x), logits.logsumexp(1))
    for labels in (y, y.tolist(), y.numpy().astype(np.uint8), y[:, None], nn.functional.one_hot(y, CLASSES)):
        torch.testing.assert_close(model.log_pxy(x, labels), logits[torch.arange(4), y])
    assert model.log_px(x.requires_grad_()).requires_grad


@pytest.mark.parametrize("labels", [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, -1]])
def test_labels_that_do_not_fit_are_refused(labels):
    with pytest.raises(ValueError, match="labels"):
        jem().log_pxy(images(4), labels)


def test_a_separate_energy_drives_the_refinement_and_is_the_density():
    energy = GaussianEnergy(1.0, 0.5)
    model = JEMClassifier(smooth_cnn(), Refinement(steps=1, step_size=1.0, noise=0.0), energy=energy)
    x = images(3)
    torch.testing.assert_close(model.refine(x), torch.full((3, 1, *SHAPE), 0.75).double())
    torch.testing.assert_close(model.log_px(x), energy(2 * x - 1))
    torch.testing.assert_close(model.log_pxy(x, [0, 1, 2]), model.network(2 * x - 1).detach().diagonal())


def test_an_energy_of_one_column_means_the_same():
    class Column(GaussianEnergy):
        def forward(self, x):
            return super().forward(x)[:, None]

    a, b = (JEMClassifier(smooth_cnn(), quick(), energy=e) for e in (GaussianEnergy(), Column()))
    assert torch.equal(a(images(2)), b(images(2)))


@pytest.mark.parametrize("input_range", [(-1.0, 1.0), (0, 1), (0.0, 255.0), (-2.1, 2.6)])
def test_input_range_is_the_networks_own_business(input_range):
    low, high = input_range
    model = JEMClassifier(LinearNet(), input_range=input_range).with_refinement(steps=0)
    x = images(3)
    torch.testing.assert_close(model(x), (low + (high - low) * x).flatten(1) @ model.network.weight.detach().T)
    torch.testing.assert_close(model.refine(x)[:, 0], x)


def test_refine_leaves_the_box_only_without_clamp():
    x = images(4)
    kwargs = {"steps": 2, "noise": 5.0}
    assert jem(**kwargs).refine(x).max() > 1
    states = jem(clamp=True, **kwargs).refine(x)
    assert states.min() == 0
    assert states.max() == 1


def test_refine_without_randomness_returns_one_chain():
    assert jem(noise=0.0, init_noise=0.0).refine(images(2)).shape == (2, 1, *SHAPE)
    assert jem().with_refinement(steps=0).refine(images(2)).shape == (2, 1, *SHAPE)
    assert jem().with_refinement(steps=0, init_noise=0.1).refine(images(2)).shape == (2, 3, *SHAPE)


# Views


def test_zero_steps_make_any_network_a_deterministic_classifier():
    model = jem().with_refinement(steps=0)
    x = images(5)
    assert model.deterministic
    assert model.refinement == quick(steps=0, init_noise=0.0, chains=1)
    assert torch.equal(model(x), model(x))
    torch.testing.assert_close(model(x), model.network(2 * x - 1).detach())
    noisy = jem().with_refinement(steps=0, init_noise=0.1)
    assert not noisy.deterministic
    assert not torch.equal(noisy(x), noisy(x))


def test_views_share_the_network_but_neither_position_nor_frozen_state():
    model, x = jem(seed=4), images(2)
    start = model(x)
    view = model.with_gradient("straight-through")
    assert view.network is model.network
    assert torch.equal(view(x), start)
    view(x), view(x)
    assert not torch.equal(model(x), start)
    with model.frozen_noise(1):
        assert not model.with_refinement(steps=2).deterministic
        assert not view.deterministic
    with view.frozen_noise(1):
        assert not model.deterministic
    view.reseed(9)
    assert model.seed == 4


def test_views_keep_every_other_setting():
    model = JEMClassifier(
        smooth_cnn(), quick(), (0, 1), GaussianEnergy(), "vote", "straight-through", 7, input_shape=SHAPE,
        num_classes=CLASSES, memory=5, card={"name": "x"},
    ).eval()  # fmt: skip
    for view in (model.with_refinement(steps=4), model.with_gradient("exact")):
        for name in ("network", "energy", "input_range", "aggregate", "seed", "input_shape", "num_classes", "memory",
                     "card", "training"):  # fmt: skip
            assert getattr(view, name) == getattr(model, name), name
    assert model.with_refinement(steps=4).gradient == "straight-through"
    assert model.with_gradient("exact").refinement == model.refinement


# Noise


def test_the_plain_stream_gives_the_r_th_row_noise_r():
    model, x = jem(seed=2), images(9)
    whole = model(x)
    keyed = draw(model, x, purpose="plain", seed=2)
    torch.testing.assert_close(whole, keyed, rtol=1e-12, atol=1e-12)
    model.reseed(2)
    parts = torch.cat([model(x[:2]), model(x[2:7]), model(x[7:7]), model(x[7:])])
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model(x), draw(model, x, torch.arange(9, 18), 0, "plain", 2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("network", [smooth_cnn, leaky_cnn])
@pytest.mark.parametrize("memory", [0, 2**14, 2**30])
def test_batches_of_7_and_64_agree_in_float64_gradients_included(network, memory):
    model = JEMClassifier(network(), quick(), memory=memory)
    x = images(70)

    def run(size):
        model.reseed(0)
        outs, grads = [], []
        for part in x.split(size):
            part = part.clone().requires_grad_()
            out = model(part)
            outs.append(out.detach())
            grads.append(torch.autograd.grad(out[:, 0].sum(), part)[0])
        return torch.cat(outs), torch.cat(grads)

    torch.testing.assert_close(run(7), run(64), rtol=1e-10, atol=1e-11)


def test_keyed_draws_do_not_depend_on_order_or_active_set():
    model, x = jem(), images(8)
    whole = draw(model, x)
    order = torch.tensor([5, 0, 7, 2])
    torch.testing.assert_close(draw(model, x[order], order), whole[order], rtol=1e-12, atol=1e-12)


def test_draws_differ_by_each_part_of_their_key_and_leave_the_stream_alone():
    model, x = jem(), images(3)
    outs = [
        draw(model, x), draw(model, x, draws=1), draw(model, x, purpose="select"), draw(model, x, seed=1),
        draw(model, x, ids=[3, 4, 5]), model(x), model.frozen_noise(0).__enter__()(x),
    ]  # fmt: skip
    for i, a in enumerate(outs):
        assert not any(torch.equal(a, b) for b in outs[:i])
    fresh = jem()
    draw(fresh, x)
    fresh.log_px(x)
    assert torch.equal(fresh(x), jem()(x))


def test_draw_takes_arrays_and_repeated_images():
    model, x = jem(), images(1).expand(4, -1, -1, -1)
    out = model.draw(x, np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1]), "attack", 5)
    assert len({tuple(row.tolist()) for row in out}) == 4
    torch.testing.assert_close(out[1:2], model.draw(x[:1], torch.tensor([0]), torch.tensor([1]), "attack", 5))


@pytest.mark.parametrize(("ids", "draws"), [([0], [0, 0, 0]), ([0, 1, 2], [0]), ([0], [0]), ([[0, 1, 2]], [[0] * 3])])
def test_draw_refuses_ids_that_do_not_fit(ids, draws):
    with pytest.raises(ValueError, match="image_ids and draw_ids"):
        jem().draw(images(3), torch.tensor(ids), torch.tensor(draws), "attack", 0)


def test_draw_refuses_an_unknown_purpose():
    with pytest.raises(ValueError, match="purpose"):
        draw(jem(), images(1), purpose="play")


def test_seeds_decide_and_reseed_restarts():
    x = images(3)
    assert torch.equal(jem(seed=3)(x), jem().reseed(3)(x))
    assert not torch.equal(jem(seed=3)(x), jem(seed=4)(x))
    model = jem(seed=np.int32(3))
    first, second = model(x), model(x)
    assert not torch.equal(first, second)
    model.reseed(3)
    assert torch.equal(model(x), first)
    assert torch.equal(model(x), second)


def test_frozen_noise_is_a_deterministic_function_of_the_row():
    model, x = jem(), images(4)
    with model.frozen_noise(seed=3) as inside:
        assert inside is model
        assert model.deterministic
        first = model(x)
        assert torch.equal(model(x), first)
        torch.testing.assert_close(model(x[:2]), first[:2], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(draw(model, x[2:], [2, 3], draws=8), first[2:], rtol=1e-12, atol=1e-12)
        assert torch.equal(draw(model, x, purpose="attack"), first)
    assert not model.deterministic
    with jem(seed=8).frozen_noise(3) as other:
        assert torch.equal(other(x), first)


def test_frozen_noise_is_reentrant_and_restores_the_stream():
    model, reference, x = jem(), jem(), images(3)
    assert torch.equal(model(x), reference(x))
    block = model.frozen_noise(3)
    with block:
        three = model(x)
        with model.frozen_noise(5):
            assert not torch.equal(model(x), three)
            with block:
                assert torch.equal(model(x), three)
        assert torch.equal(model(x), three)
    with pytest.raises(KeyError), block:
        raise KeyError
    assert torch.equal(model(x), reference(x))


@pytest.mark.parametrize("seed", [1.5, None, "3"])
def test_seeds_that_are_no_integers_are_refused_at_once(seed):
    model = jem()
    for call in (lambda: jem(seed=seed), lambda: model.reseed(seed), lambda: model.frozen_noise(seed)):
        with pytest.raises(TypeError, match="integer seed"):
            call()


def noisy(**kwargs):
    model = JEMClassifier(NoisyNet(), quick(**kwargs))
    with pytest.warns(UserWarning, match="global random numbers"):
        model(images(1))
    return model.reseed(0)


@pytest.mark.parametrize("steps", [0, 2])
def test_networks_with_randomness_warn_once_and_stay_reproducible_and_independent(steps):
    x = images(3)
    model, same = noisy(steps=steps, init_noise=0.0), noisy(steps=steps, init_noise=0.0)
    assert not model.deterministic
    torch.manual_seed(1)
    first, second = model(x), model(x)
    torch.manual_seed(2)
    assert torch.equal(same(x), first)
    assert torch.equal(same(x), second)
    assert not torch.equal(first, second)
    assert not torch.equal(draw(model, x), draw(model, x, draws=1))
    assert torch.equal(draw(model, x, draws=1), draw(same, x, draws=1))
    with model.frozen_noise(3):
        assert model.deterministic
        assert torch.equal(model(x), model(x))
    model.with_refinement(steps=1)(x)  # a view does not warn again


def test_such_networks_get_fresh_noise_in_every_step_and_the_same_when_recomputed():
    seeds = []

    class Recording(NoisyNet):
        def forward(self, x):
            seeds.append(torch.initial_seed())
            return super().forward(x)

    model = JEMClassifier(Recording(), quick(), memory=0, input_shape=SHAPE)
    x = images(1).requires_grad_()
    with pytest.warns(UserWarning, match="global random"):
        model(x)
    single = model.with_refinement(chains=1)
    single(x)
    seeds.clear()
    out = single(x)
    forward = list(seeds)
    out.sum().backward()
    assert len(set(forward)) == len(forward) == 3
    assert seeds[3:] == [forward[1], forward[0]]


def test_randomness_is_known_before_the_first_call_where_the_shape_is():
    model = JEMClassifier(NoisyNet(), Refinement(steps=0), input_shape=SHAPE)
    with pytest.warns(UserWarning, match="global random"):
        assert not model.deterministic
    assert JEMClassifier(smooth_cnn(), Refinement(steps=0), input_shape=SHAPE).deterministic


def test_an_energy_with_randomness_is_treated_like_a_network_with_it():
    class NoisyEnergy(GaussianEnergy):
        def forward(self, x):
            return super().forward(x + torch.randn_like(x))

    def build():
        return JEMClassifier(smooth_cnn(), quick(steps=2), energy=NoisyEnergy())

    torch.manual_seed(0)
    before = torch.get_rng_state()
    with pytest.warns(UserWarning, match="global random"):
        first = build()(images(2))
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="global random"):
        assert torch.equal(build()(images(2)), first)


# Modes, shapes and types


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("leaf", [False, True])
def test_every_method_works_in_every_grad_mode_and_gives_the_same(mode, leaf):
    x, y = images(3), [0, 1, 2]
    expected = jem()
    reference = [expected(x), expected.refine(x), expected.log_px(x), expected.log_pxy(x, y), draw(expected, x)]
    x.requires_grad_(leaf)
    model = jem()
    with mode():
        got = [model(x), model.refine(x), model.log_px(x), model.log_pxy(x, y), draw(model, x)]
    for a, b in zip(got, reference, strict=True):
        assert torch.equal(a, b)
        assert a.requires_grad is (leaf and mode is torch.enable_grad)
    with torch.inference_mode():
        labels = torch.tensor(y)
    assert torch.equal(model.log_pxy(x, labels), reference[3])


def test_images_made_in_inference_mode_work_outside_and_the_output_can_be_used():
    with torch.inference_mode():
        made = images(3)
        inside = jem()(made)
    for x in (made, made[:, :, ::1], made.float().double()):
        model = jem()
        assert torch.allclose(model(x), jem()(x.clone()))
        model.refine(x), model.log_px(x)
    assert torch.equal(jem()(made), inside)
    with torch.no_grad():
        assert torch.equal(jem()(made), inside)
        usable = jem()(made)
    nn.Linear(CLASSES, 1).double()(usable).sum().backward()


@pytest.mark.parametrize("build", [smooth_cnn, NormedNet])
@pytest.mark.parametrize("memory", [0, 2**30])
def test_a_model_built_in_inference_mode_works_everywhere(build, memory):
    with torch.inference_mode():
        model = JEMClassifier(build(), quick(), memory=memory)
        inside = model(images(2))
    names = {name: id(p) for name, p in model.named_parameters()}
    model.reseed(0)
    x = images(2).requires_grad_()
    out = model(x)
    assert torch.equal(out, inside)
    out.sum().backward()
    normal = JEMClassifier(build(), quick())
    same = x.detach().clone().requires_grad_()
    normal(same).sum().backward()
    torch.testing.assert_close(x.grad, same.grad)
    assert {name: id(p) for name, p in model.named_parameters()} == names
    assert all(p.is_inference() for p in model.parameters())


@pytest.mark.parametrize("how", AGGREGATES)
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("network", [smooth_cnn, GaussianNet, NormedNet])
def test_no_images_and_one(how, steps, network):
    model = JEMClassifier(network(), quick(steps=steps, init_noise=0.0), aggregate=how)
    for count in (0, 1):
        x = images(count).requires_grad_()
        out = model(x)
        assert out.shape == (count, CLASSES)
        out.sum().backward()
        assert x.grad.shape == x.shape
        assert model.refine(x).shape == (count, model.refinement.independent_chains, *SHAPE)
        assert model.log_px(x).shape == model.log_pxy(x, [0] * count).shape == (count,)
        assert draw(model, x).shape == (count, CLASSES)
        with torch.inference_mode():
            assert model(x).shape == (count, CLASSES)
    torch.testing.assert_close(jem(steps=2)(images(3)[:1]), jem(steps=2)(images(3))[:1])


def test_no_images_with_a_network_that_cannot_take_none():
    class Picky(LinearNet):
        def forward(self, x):
            return x.reshape(len(x), -1) @ self.weight.T  # -1 is ambiguous for no rows

    model = JEMClassifier(Picky(), quick(), energy=nn.Sequential(Picky(), nn.MaxPool1d(CLASSES)))
    assert model(images(0)).shape == (0, CLASSES)
    assert model.log_px(images(0)).shape == (0,)


class ViewNet(LinearNet):
    """Fails on anything but contiguous input."""

    def forward(self, x):
        return x.view(len(x), -1) @ self.weight.T


@pytest.mark.parametrize("chains", [1, 3])
def test_memory_layout_changes_nothing(chains):
    shape = (3, 4, 5)
    x = images(4, shape=shape)
    layouts = [
        x.contiguous(memory_format=torch.channels_last), x.transpose(2, 3).contiguous().transpose(2, 3),
        images(8, shape=shape).index_copy(0, torch.arange(0, 8, 2), x)[::2], x.flip(3).flip(3),
    ]  # fmt: skip
    for steps in (0, 2):
        build = lambda: JEMClassifier(ViewNet(shape=shape), quick(steps=steps, chains=chains))  # noqa: B023, E731
        expected = build()(x)
        for layout in layouts:
            assert torch.equal(build()(layout), expected)
            build().refine(layout), build().log_px(layout)
            leaf = layout.detach().requires_grad_()
            build()(leaf).sum().backward()
            assert leaf.grad.shape == x.shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("network_dtype", [torch.float32, torch.float64])
def test_images_are_cast_to_the_networks_type(dtype, network_dtype):
    model = jem(smooth_cnn().to(network_dtype))
    x = images(3, dtype=dtype).requires_grad_()
    out = model(x)
    assert out.dtype == network_dtype
    assert torch.equal(out, model.reseed(0)(x.detach().to(network_dtype)))
    out.sum().backward()
    assert x.grad.dtype == dtype
    assert model.refine(x).dtype == model.log_px(x).dtype == network_dtype


def test_arrays_and_lists_are_images_too():
    x = images(2)
    for given in (x.numpy(), x.tolist(), x.numpy()[::-1][::-1], x.numpy().astype(">f8")):
        torch.testing.assert_close(jem()(given), jem()(x))
    assert jem()(x.numpy().astype(np.float16)).dtype == torch.float64


def test_a_network_without_parameters_computes_in_float32():
    model = JEMClassifier(GaussianNet(), quick())
    assert model(images(2)).dtype == torch.float32
    assert list(model.parameters()) == []


def test_float64_after_to_and_float32_differ_only_in_rounding():
    x = images(3)
    single, double = jem(smooth_cnn().float()), jem(smooth_cnn().float()).to(torch.float64)
    assert double(x).dtype == torch.float64
    torch.testing.assert_close(single(x).double(), double.reseed(0)(x), rtol=1e-4, atol=1e-4)


def test_autocast_around_it_changes_nothing():
    x = images(2, dtype=torch.float32)
    expected = jem(smooth_cnn().float())(x)
    with torch.autocast("cpu"):
        assert torch.equal(jem(smooth_cnn().float())(x), expected)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("memory", [0, 2**30])
def test_networks_that_compute_in_place_are_no_different(steps, memory):
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = smooth_cnn()

        def forward(self, x):
            return self.inner(x.mul_(0.5).add_(0.1))

    class OutOfPlace(InPlace):
        def forward(self, x):
            return self.inner(x * 0.5 + 0.1)

    results = []
    for build in (InPlace, OutOfPlace):
        model = JEMClassifier(build(), quick(steps=steps), (0, 1), memory=memory)
        x = images(4)
        calls = (model, model.refine, model.log_px, lambda x: model.log_pxy(x, [0] * 4), lambda x: draw(model, x))  # noqa: B023
        plain = [call(x) for call in calls]
        assert torch.equal(x, images(4))
        x.requires_grad_()
        results.append([*plain, *(torch.autograd.grad(call(x).square().sum(), x)[0] for call in calls)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_a_view_made_before_the_first_call_learns_of_the_networks_randomness():
    model = JEMClassifier(NoisyNet(), Refinement(steps=0))
    view = model.with_gradient("straight-through")
    with pytest.warns(UserWarning, match="global random"):
        model(images(1))
    assert not view.deterministic
    view(images(1))


# Leaks


def snapshot(model, x):
    return {
        "training": [m.training for m in model.modules()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "grad": [p.grad is None for p in model.parameters()],
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "rng": torch.get_rng_state(),
        "numpy": np.random.get_state()[1],
        "x": (x.detach().clone(), x.requires_grad),
        "device": model.device,
    }


def assert_same(before, after):
    torch.testing.assert_close(before.pop("state"), after.pop("state"), rtol=0, atol=0)
    for name, value in before.items():
        torch.testing.assert_close(value, after[name], rtol=0, atol=0) if name == "x" else None
    assert before["x"][1] is after["x"][1]
    for name in ("training", "requires_grad", "grad", "device"):
        assert before[name] == after[name], name
    assert torch.equal(before["rng"], after["rng"])
    assert np.array_equal(before["numpy"], after["numpy"])


@pytest.mark.parametrize("train", [True, False, None])
@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("memory", [0, 2**30])
@pytest.mark.parametrize("network", [NormedNet, NoisyNet])
@pytest.mark.filterwarnings("ignore:the network draws")
def test_nothing_leaks(train, leaf, memory, network):
    model = JEMClassifier(network(), quick(), memory=memory, energy=nn.Sequential(NormedNet(), nn.MaxPool1d(CLASSES)))
    if train is None:  # mixed flags
        for i, m in enumerate(model.modules()):
            m.training = i % 2 == 0
        for i, p in enumerate(model.parameters()):
            p.requires_grad_(i % 2 == 0)
    else:
        model.train(train)
    torch.manual_seed(3)
    x = images(3).requires_grad_(leaf)
    before = snapshot(model, x)
    out = model(x) + draw(model, x)
    out = out + model.log_px(x)[:, None] + model.log_pxy(x, [0, 1, 2])[:, None] + model.refine(x).mean()
    assert out.requires_grad is leaf
    if leaf:
        out.sum().backward()
        assert torch.isfinite(x.grad).all()
        x.grad = None
    with model.frozen_noise(1), torch.inference_mode():
        model(x)
    assert model.deterministic is False
    assert_same(before, snapshot(model, x))


def test_nothing_leaks_from_a_failing_call():
    class Broken(NormedNet):
        def forward(self, x):
            super().forward(x)
            torch.rand(1)
            raise KeyError("broken")

    model = JEMClassifier(Broken(), quick()).train()
    x = images(2).requires_grad_()
    before = snapshot(model, x)
    with pytest.raises(KeyError):
        model(x)
    assert_same(before, snapshot(model, x))


def test_batchnorm_and_dropout_compute_in_eval_mode_also_when_left_training():
    x = images(4)
    trained, evaluated = jem(NormedNet().train()), jem(NormedNet().eval())
    trained.train()
    assert torch.equal(trained(x), evaluated(x))
    assert torch.equal(trained.log_px(x), evaluated.log_px(x))
    assert trained.with_refinement(steps=0).deterministic


def test_the_global_rng_decides_nothing():
    outs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        np.random.seed(seed)
        outs.append(jem()(images(2)))
    assert torch.equal(*outs)


def test_a_graph_of_the_callers_through_the_same_parameters_survives():
    network = smooth_cnn()
    loss = network(2 * images(2) - 1).sum()
    jem(network)(images(2))
    loss.backward()
    assert all(p.grad is not None for p in network.parameters())


def test_the_output_carries_no_graph_to_the_parameters():
    model = jem()
    assert not model(images(2)).requires_grad
    x = images(2).requires_grad_()
    out = model(x)
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(out.sum(), list(model.parameters()))


def test_it_behaves_as_a_module():
    model, x = jem(), images(3)
    expected = model(x)
    assert set(dict(model.named_parameters())) == {f"network.{n}" for n, _ in model.network.named_parameters()}
    assert model.train().network.training
    assert not model.eval().network.training
    twin = copy.deepcopy(model)
    assert torch.equal(twin.reseed(0)(x), expected)
    with torch.no_grad():
        next(twin.parameters()).add_(1)
    assert not torch.equal(twin.reseed(0)(x), expected)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin.reseed(0)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model)).reseed(0)(x), expected)  # noqa: S301
    with_graph = images(1).requires_grad_()
    model(with_graph).sum()
    copy.deepcopy(model)


def test_a_copy_goes_on_where_the_original_stood():
    model, x = jem(), images(2)
    model(x)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x))


# Refusals


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda x: x * 255, ValueError, r"\[0, 1\].*range \[.*25"),
        (lambda x: x - 0.5, ValueError, r"range \[-0"),
        (lambda x: x + 2e-6 + 1 - x.max(), ValueError, r"\[0, 1\]"),
        (lambda x: (x * 255).to(torch.uint8), TypeError, "divide by 255"),
        (lambda x: (x * 255).long().numpy(), TypeError, "divide by 255"),
        (lambda x: x > 0.5, TypeError, "floating point"),
        (lambda x: x * torch.nan, ValueError, "NaN"),
        (lambda x: x / 0, ValueError, "inf"),
        (lambda x: x[0], ValueError, r"\(N, C, H, W\)"),
        (lambda x: x.repeat(1, 3, 1, 1), ValueError, r"\(N, 1, 5, 5\)"),
        (lambda x: None, TypeError, "numbers"),
        (lambda x: "cat", TypeError, "numbers"),
    ],
)
def test_bad_images_are_refused_before_any_computation(make, error, text):
    class Never(nn.Module):
        def forward(self, x):
            raise AssertionError("computed")

    model = JEMClassifier(Never(), quick(), input_shape=SHAPE)
    bad = make(images(2))
    for call in (model, model.refine, model.log_px, lambda x: model.log_pxy(x, [0, 1]), lambda x: draw(model, x, [0])):
        with pytest.raises(error, match=text):
            call(bad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_off_by_a_millionth_are_clamped_and_pass_gradients(dtype):
    model = JEMClassifier(LinearNet(), Refinement(steps=0))
    inside = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.5] * 5, dtype=dtype).reshape(1, *SHAPE)
    off = torch.tensor([-1e-6, 1 + 1e-6, -1e-7, 1, 0.5] * 5, dtype=dtype).reshape(1, *SHAPE)
    kept = off.clone()
    x = off.requires_grad_()
    out = model(x)
    assert torch.equal(out, model(inside))
    assert torch.equal(model.refine(x)[:, 0], inside.double())
    assert torch.equal(x.detach(), kept)
    (g,) = torch.autograd.grad(out[:, 0].sum(), x)
    torch.testing.assert_close(g.flatten().double(), 2 * model.network.weight[0].detach())


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"network": lambda x: x}, TypeError, "nn.Module"),
        ({"energy": lambda x: x}, TypeError, "energy"),
        ({"refinement": 10}, TypeError, "Refinement"),
        ({"input_range": (1, 0)}, ValueError, "input range"),
        ({"input_range": (0, math.nan)}, ValueError, "input range"),
        ({"input_range": (0, math.inf)}, ValueError, "input range"),
        ({"aggregate": "mean"}, ValueError, "'logits', 'probabilities', 'vote'"),
        ({"gradient": "bpda"}, ValueError, "straight-through"),
        ({"gradient": "transfer"}, ValueError, "attack"),
        ({"seed": 1.5}, TypeError, "seed"),
    ],
)
def test_settings_without_sense_are_refused(kwargs, error, text):
    with pytest.raises(error, match=text):
        JEMClassifier(**{"network": smooth_cnn(), **kwargs})


@pytest.mark.parametrize(
    "spoil", [lambda y: y[:, 0], lambda y: y[:-1], lambda y: y[:, :, None], lambda y: (y,), lambda y: None]
)
@pytest.mark.parametrize("steps", [0, 1])
def test_outputs_that_are_no_logits_are_refused(spoil, steps):
    class Spoilt(GaussianNet):
        def forward(self, x):
            return spoil(super().forward(x))

    with pytest.raises(ValueError, match=r"logits \(\d+, K\) from the network, got"):
        JEMClassifier(Spoilt(), quick(steps=steps, init_noise=0.0))(images(2))


def test_another_number_of_classes_is_refused():
    with pytest.raises(ValueError, match=r"logits \(2, 10\)"):
        JEMClassifier(smooth_cnn(), quick(), num_classes=10)(images(2))


def test_an_energy_of_another_shape_is_refused():
    for bad in (smooth_cnn(), nn.Sequential(smooth_cnn(), nn.Unflatten(1, (1, -1)))):
        with pytest.raises(ValueError, match="energy, got"):
            JEMClassifier(smooth_cnn(), quick(), energy=bad)(images(2))


def test_work_done_is_counted():
    model = jem(steps=2, chains=3)
    with torch.no_grad():
        model(images(2))
    assert (model.spent.forwards, model.spent.backwards) == (2 * 3 * 3, 2 * 3 * 2)


def test_many_views_frozen_at_once():
    model = jem()
    views = [model.with_refinement(noise=0.01 * i) for i in range(1, 4)]
    with ExitStack() as stack:
        for view in views:
            stack.enter_context(view.frozen_noise(2))
        assert all(view.deterministic for view in views)
    assert not any(view.deterministic for view in views)
