"""The exact gradient against finite differences, an unrolled graph written here on its own, and closed forms."""

import gc
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from jem_robust.classifier import JEMClassifier
from jem_robust.gradients import Chain, Spent, graph_bytes, quiet, refine_rows
from jem_robust.langevin import Refinement
from jem_robust.networks import build_network
from jem_robust.randomness import NoiseKey
from tests.worlds import SHAPE, GaussianEnergy, GaussianNet, LinearNet, NoisyNet, NormedNet, images, leaky_cnn, quick
from tests.worlds import smooth_cnn as smooth

LOW, HIGH = -1.0, 1.0


def unrolled(network, refinement, x, seed, energy=None):
    """JEM-k as plain autograd would have it: mean logits, all graphs kept (create_graph)."""
    count = refinement.chains if refinement.random else 1
    ids = torch.arange(len(x))
    key = NoiseKey.for_images(seed, "frozen", ids, torch.zeros_like(ids), count)
    state = (LOW + (HIGH - LOW) * x).repeat_interleave(count, 0)
    state = state + refinement.init_noise * key.normal(0, tuple(x.shape[1:]), x.dtype)
    for t in range(1, refinement.steps + 1):
        log_p = network(state).logsumexp(1) if energy is None else energy(state).reshape(-1)
        (g,) = torch.autograd.grad(log_p.sum(), state, create_graph=True)
        if refinement.gradient_clamp is not None:
            g = torch.clamp(g, -refinement.gradient_clamp, refinement.gradient_clamp)
        state = state + refinement.step_size * g + refinement.noise * key.normal(t, tuple(x.shape[1:]), x.dtype)
        if refinement.clamp:
            state = torch.clamp(state, LOW, HIGH)
    return network(state).reshape(len(x), count, -1).mean(1)


def frozen(model, seed=3):
    def f(x):
        with model.frozen_noise(seed):
            return model(x)

    return f


def gradient(f, x, weights=None):
    x = x.detach().clone().requires_grad_()
    out = f(x)
    weights = torch.arange(1.0, out.numel() + 1, dtype=out.dtype).reshape(out.shape) if weights is None else weights
    (g,) = torch.autograd.grad((out * weights).sum(), x)
    return out.detach(), g


def energy_net():
    return nn.Sequential(smooth(7, classes=1), nn.Flatten(0))


VARIANTS = {
    "plain": {},
    "clamp": {"clamp": True},
    "gradient clamp": {"gradient_clamp": 0.4},
    "both": {"clamp": True, "gradient_clamp": 0.4},
    "no noise": {"noise": 0.0, "init_noise": 0.0},
}


@pytest.mark.parametrize("memory", [0, 2**30])
@pytest.mark.parametrize("steps", [1, 10])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("energy", [None, energy_net], ids=["own", "separate"])
def test_exact_equals_the_unrolled_graph(steps, variant, memory, energy):
    refinement = quick(steps=steps, **VARIANTS[variant])
    network, driver = smooth(), energy() if energy else None
    model = JEMClassifier(network, refinement, energy=driver, memory=memory)
    got = gradient(frozen(model), images(2))
    expected = gradient(lambda x: unrolled(network, refinement, x, 3, driver), images(2))
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("build", [leaky_cnn, NormedNet, LinearNet], ids=lambda b: b.__name__)
@pytest.mark.parametrize("memory", [0, 2**30])
def test_exact_equals_the_unrolled_graph_on_other_networks(build, memory):
    network = build().eval()
    refinement = quick(steps=5)
    got = gradient(frozen(JEMClassifier(network, refinement, memory=memory)), images(3))
    torch.testing.assert_close(got, gradient(lambda x: unrolled(network, refinement, x, 3), images(3)))


def test_clamps_really_bind_in_these_tests():
    for steps in (1, 10):
        plain, *others = (
            gradient(frozen(JEMClassifier(smooth(), quick(steps=steps, **VARIANTS[v]))), images(2))[1] for v in VARIANTS
        )
        assert all((plain - other).abs().max() > 1e-3 for other in others)


@pytest.mark.parametrize("memory", [0, 2**30])
@pytest.mark.parametrize("steps", [1, 10])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradcheck_with_frozen_noise(steps, variant, memory):
    model = JEMClassifier(smooth(), quick(steps=steps, chains=2, **VARIANTS[variant]), memory=memory)
    x = images(1, seed=5, shape=(1, 5, 5)).requires_grad_()
    assert torch.autograd.gradcheck(frozen(model), x, eps=1e-7, atol=1e-5)


@pytest.mark.parametrize("memory", [0, 2**30])
def test_gradcheck_with_an_energy_of_its_own_and_through_refine(memory):
    model = JEMClassifier(smooth(), quick(steps=3, chains=2), energy=energy_net(), memory=memory)
    x = images(1).requires_grad_()
    assert torch.autograd.gradcheck(frozen(model), x, eps=1e-7, atol=1e-5)

    def refined(x):
        with model.frozen_noise(1):
            return model.refine(x)

    assert torch.autograd.gradcheck(refined, x, eps=1e-7, atol=1e-5)


def test_gaussian_energy_has_its_closed_form():
    """dx_T/dx_0 = (1 - a c)^T I in network units, whatever the noise."""
    c, m, T, a = 0.5, 0.2, 6, 0.3
    model = JEMClassifier(GaussianNet(c, m), quick(steps=T, step_size=a), energy=GaussianEnergy(c, m))
    x = images(2, dtype=torch.float32).requires_grad_()
    states = model.refine(x)
    (g,) = torch.autograd.grad(states.sum(), x)
    torch.testing.assert_close(g, torch.full_like(g, 3 * (1 - a * c) ** T))


def test_gaussian_clamps_cut_exactly_the_clipped_components():
    c, a = 1.0, 0.5
    x = torch.tensor([0.0, 0.3, 0.5, 1.0]).reshape(1, 1, 2, 2).requires_grad_()  # -1, -.4, 0, 1: scores 1, .4, 0, -1
    still = Refinement(steps=1, step_size=a, noise=0.0, gradient_clamp=0.5)
    (g,) = torch.autograd.grad(JEMClassifier(GaussianNet(c, 0.0), still).refine(x).sum(), x)
    torch.testing.assert_close(g.flatten(), torch.tensor([1.0, 1 - a * c, 1 - a * c, 1.0]))
    push = Refinement(steps=1, step_size=a, noise=0.0, clamp=True)  # mean 3: x + .5 (3 - x) leaves [-1, 1] for x > -1
    (g,) = torch.autograd.grad(JEMClassifier(GaussianNet(c, 3.0), push).refine(x).sum(), x)
    torch.testing.assert_close(g.flatten(), torch.tensor([1 - a * c, 0.0, 0.0, 0.0]))


def test_linear_log_density_has_no_hessian():
    network = LinearNet(classes=1)
    for memory in (0, 2**30):
        model = JEMClassifier(network, quick(steps=3), memory=memory)
        g = gradient(frozen(model), images(2), weights=1.0)[1]
        torch.testing.assert_close(g.flatten(1), 2 * network.weight.detach().expand(2, -1))


def test_straight_through_is_the_identity_and_differs_from_exact():
    network, refinement, x = smooth(), quick(steps=3), images(2)
    model = JEMClassifier(network, refinement)
    bpda = model.with_gradient("straight-through")
    out, exact = gradient(frozen(model), x)
    same, g = gradient(frozen(bpda), x)
    assert torch.equal(out, same)
    assert (g - exact).norm() > 0.05 * exact.norm()
    with model.frozen_noise(3):
        states = (LOW + (HIGH - LOW) * model.refine(x)).flatten(0, 1)
    _, at_end = gradient(lambda s: network(s).reshape(2, 3, -1).mean(1), states)
    torch.testing.assert_close(g, 2 * at_end.reshape(2, 3, *SHAPE).sum(1))


@pytest.mark.parametrize("how", ["exact", "straight-through"])
def test_without_steps_both_are_the_networks_own_gradient(how):
    network = smooth()
    model = JEMClassifier(network, gradient=how).with_refinement(steps=0)
    got = gradient(model, images(3))
    torch.testing.assert_close(got, gradient(lambda x: network(2 * x - 1), images(3)))


@pytest.mark.parametrize("memory", [0, 2**30])
@pytest.mark.parametrize("network", [smooth, NoisyNet])
def test_backward_uses_its_forwards_noise_after_the_block_closed(memory, network):
    model = JEMClassifier(network(), quick(steps=3), memory=memory)
    x = images(2).requires_grad_()
    with pytest.warns(UserWarning, match="global random") if network is NoisyNet else nullcontext():
        model(x)
    with model.frozen_noise(3):
        out = model(x)
        (inside,) = torch.autograd.grad(out.square().sum(), x, retain_graph=True)
        again = model(x)
    with model.frozen_noise(8):
        model(x)
    model.reseed(9)(x)
    torch.manual_seed(0)
    (after,) = torch.autograd.grad(again.square().sum(), x)
    torch.testing.assert_close(after, inside, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("memory", [0, 2**30])
def test_plain_stream_backward_matches_its_own_draw(memory):
    model = JEMClassifier(smooth(), quick(steps=3), memory=memory)
    x = images(2).requires_grad_()
    first, second = model(x), model(x)
    ids = torch.arange(4)
    keyed = [model.draw(x, ids[i : i + 2], torch.zeros(2).long(), "plain", 0) for i in (0, 2)]
    for out, same in zip((second, first), keyed[::-1], strict=True):
        (a,), (b,) = torch.autograd.grad(out.sum(), x), torch.autograd.grad(same.sum(), x)
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("memory", [0, 2**30])
def test_a_graph_can_be_used_twice(memory):
    model = JEMClassifier(smooth(), quick(steps=4, clamp=True), memory=memory)
    x = images(2).requires_grad_()
    out = model(x)
    first = torch.autograd.grad(out[:, 0].sum(), x, retain_graph=True)[0]
    other = torch.autograd.grad(out[:, 1].sum(), x, retain_graph=True)[0]
    again = torch.autograd.grad(out[:, 0].sum(), x)[0]
    torch.testing.assert_close(first, again, rtol=1e-12, atol=1e-12)
    assert (first - other).abs().max() > 1e-3


def test_second_derivatives_are_refused_rather_than_wrong():
    x = images(1).requires_grad_()
    (g,) = torch.autograd.grad(JEMClassifier(smooth(), quick())(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()


def test_backward_recomputes_in_eval_mode_with_frozen_parameters_and_without_autocast():
    network = NormedNet()
    model = JEMClassifier(network, quick(steps=3), memory=0)
    expected = gradient(frozen(model), images(2))[1]
    x = images(2).requires_grad_()
    out = frozen(model)(x)
    model.train()
    seen = []
    network.register_forward_hook(lambda m, _, __: seen.append((m.training, m.layers[0].weight.requires_grad)))
    with torch.autocast("cpu"):
        (g,) = torch.autograd.grad((out * torch.arange(1.0, 7).reshape(2, 3)).sum(), x)
    assert seen
    assert set(seen) == {(False, False)}
    assert all(m.training for m in model.modules())
    torch.testing.assert_close(g, expected)


def living_bytes():
    """Bytes of all tensors that live as python objects, a chain's states among them."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(found.values())


@pytest.mark.parametrize("clamp", [False, True])
def test_memory_grows_with_the_steps_by_the_states_only(clamp):
    network = smooth(channels=1)
    x = images(2).requires_grad_()
    state = 2 * 3 * x[0].numel() * 8

    def held(steps):
        """Bytes of tensors that a forward leaves alive besides what it was given."""
        model = JEMClassifier(network, quick(steps=steps, clamp=clamp), memory=0)
        with torch.no_grad():
            model(x)  # the probe for the budget is paid once
        before = living_bytes()
        out = model(x)
        grown = living_bytes() - before
        del out
        return grown

    one, ten = held(1), held(10)
    assert 9 * state <= ten - one <= 9 * state * (1 + 1 / 8) + 1024, (one, ten, state)


def test_the_last_graph_is_gone_before_the_next_when_recomputing():
    """Peak of living graphs, counted as saved tensors alive at a time: the same for 10 steps as for 1."""

    def peak(steps, memory=0):
        alive, most = 0, 0

        class Handle:
            def __init__(self, tensor):
                nonlocal alive, most
                self.tensor = tensor
                alive += 1
                most = max(most, alive)

            def __del__(self):
                nonlocal alive
                alive -= 1

        model = JEMClassifier(smooth(), Refinement(steps=steps, step_size=0.1, chains=1), memory=memory)
        x = images(1).requires_grad_()
        with torch.no_grad():
            model(x)
        with torch.autograd.graph.saved_tensors_hooks(Handle, lambda h: h.tensor):
            model(x).sum().backward()
        return most

    assert peak(10) == peak(1) < peak(10, memory=2**30)


def test_budget_decides_how_many_graphs_are_kept():
    model = JEMClassifier(smooth(), quick(steps=4, chains=1), memory=0)
    x = images(2).requires_grad_()
    with quiet(model.network):
        row = graph_bytes(lambda s: model.network(s).logsumexp(1), images(2))
    model(x)
    for steps in (0, 1, 3, 4, 9):
        model.memory = 2 * row * 2 * steps
        assert model._plan(images(2))[1] == min(steps, 4)
        before = Spent(model.spent.forwards, model.spent.backwards)
        model(x).sum().backward()
        used = model.spent.since(before)
        recomputed = 2 * (4 - min(steps, 4))
        assert used.forwards == 2 * 5 + recomputed
        assert used.backwards == 2 * 4 + recomputed + 2 * 2 * 4 + 2


def test_graph_bytes_counts_a_known_graph_and_forgets_the_batch():
    def log_density(x):
        return x.exp().flatten(1).sum(1)  # saves its result: 25 doubles a row, at least

    row = graph_bytes(log_density, images(2))
    assert 25 * 8 <= row <= 8 * 25 * 8
    assert row == graph_bytes(log_density, images(6))


def test_budget_is_measured_anew_for_other_shapes_and_types():
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Softplus(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = JEMClassifier(network, quick(), memory=2**20)
    small = model._plan(images(1, dtype=torch.float32))
    large = model._plan(images(1, shape=(1, 200, 200), dtype=torch.float32))
    assert small[:2] == (64, 2)
    assert large[0] < 3


def test_a_detaching_network_is_refused_with_and_without_gradients():
    class Detached(nn.Module):
        def forward(self, x):
            return x.detach().flatten(1)

    model = JEMClassifier(Detached(), quick())
    for x in (images(1, dtype=torch.float32), images(1, dtype=torch.float32).requires_grad_()):
        with pytest.raises(ValueError, match="steps=0"):
            model(x)
    assert model.with_refinement(steps=0)(images(1)).shape == (1, 25)


def test_quiet_puts_every_flag_back_also_after_an_error():
    network = NormedNet()
    network.layers[1].eval()
    network.layers[0].weight.requires_grad_(False)
    training = [m.training for m in network.modules()]
    learning = [p.requires_grad for p in network.parameters()]
    with pytest.raises(ZeroDivisionError), quiet(network, None, network):
        1 / any(m.training for m in network.modules()) / any(p.requires_grad for p in network.parameters())
    assert [m.training for m in network.modules()] == training
    assert [p.requires_grad for p in network.parameters()] == learning


def test_chains_refine_without_a_classifier_too():
    refinement = Refinement(steps=2, step_size=0.5, noise=0.0)
    chain = Chain(
        lambda s, t: GaussianEnergy(1.0, 0.0)(s), lambda t: torch.zeros(1), refinement, (-1, 1), nullcontext, Spent()
    )
    x = images(2)
    torch.testing.assert_close(refine_rows(x, chain, "exact"), x / 4)
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: refine_rows(v, chain, "exact"), x)


def test_short_memory_makes_graphs_compact_before_it_recomputes():
    torch.manual_seed(0)
    network = build_network("wide-resnet", depth=10, width=1)
    model = JEMClassifier(network, Refinement(steps=3, chains=1))
    x = torch.rand(2, 3, 32, 32)
    gradients = []
    with quiet(network):
        enough, plenty = (2 * len(x) * 3 * model._graph_bytes(x, compact) for compact in (True, False))
    assert enough * 10 < plenty
    for memory, compact in ((plenty, False), (enough, True)):
        model.memory = memory
        assert model._plan(x)[1:] == (3, compact)
        leaf = x.clone().requires_grad_()
        ids = torch.arange(2)
        logits = model.draw(leaf, ids, ids * 0, "attack", 0)
        gradients.append(torch.autograd.grad(logits.logsumexp(1).sum(), leaf)[0])
    torch.testing.assert_close(*gradients)
