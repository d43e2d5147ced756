"""What an iteration costs and leaves behind: network calls, flags and gradients; and that it is the step of 2019."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from jem_robust.langevin import Refinement
from jem_robust.training.trainer import Trainer
from tests.small_training import QUICK, trainer

PLAIN = replace(
    QUICK, starts="uniform", restart=0.3, gap_penalty=0.0, averaging=0.0, warmup=0, drops=(),
    sampler=Refinement(4, 0.7, 0.02, chains=1),
)  # fmt: skip


@pytest.fixture
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def buffer(run: Trainer) -> Tensor:
    assert run.buffer is not None
    return run.buffer.samples


def flags(run: Trainer) -> list[Any]:
    """Modes, what learns, and gradients by identity and value."""
    parameters = list(run.network.parameters())
    gradients = [None if p.grad is None else (id(p.grad), p.grad.tolist()) for p in parameters]
    modes = [m.training for m in run.network.modules()]
    return [modes, [p.requires_grad for p in parameters], gradients, [id(p) for p in parameters]]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_sampling_leaves_the_network_as_it_was(tmp_path: Path, fails: bool, training: bool) -> None:
    run = trainer(tmp_path)
    run.network.train(training)
    first, *_, last = run.network.modules()
    assert first is not last
    last.training = not training
    chosen = list(run.network.parameters())
    chosen[0].requires_grad_(False)
    chosen[1].grad = torch.ones_like(chosen[1])
    before, state = flags(run), deepcopy(run.network.state_dict())
    seen: list[bool] = []

    def look(network: Any, _: Any) -> None:
        seen.append(any(p.requires_grad for p in network.parameters()) or network.training)
        if fails and len(seen) == 2:
            raise ArithmeticError

    handle = run.network.register_forward_pre_hook(look)
    samples = buffer(run).clone()
    if fails:
        with pytest.raises(ArithmeticError):
            run._sample(16)
        assert torch.equal(buffer(run), samples)
    else:
        assert not run._sample(16).requires_grad
        assert not torch.equal(buffer(run), samples)
    handle.remove()
    assert seen == [False] * (2 if fails else 3)  # frozen, in eval mode
    assert flags(run) == before
    assert all(torch.equal(v, state[k]) for k, v in run.network.state_dict().items())


@pytest.mark.parametrize(("objective", "steps"), [("jem", 0), ("jem", 1), ("jem", 5), ("ce", 5)])
def test_an_iteration_calls_the_network_once_a_step_and_once_more(tmp_path: Path, objective: str, steps: int) -> None:
    sampler = replace(QUICK.sampler, steps=steps)
    run = trainer(tmp_path, replace(QUICK, objective=objective, sampler=sampler, batch_size=8))
    forwards, backwards = list[int](), list[int]()

    def count(_: Any, __: Any, logits: Tensor) -> None:
        forwards.append(len(logits))
        logits.register_hook(lambda gradient: backwards.append(len(gradient)))

    run.network.register_forward_hook(count)
    run._iterate()
    expected = [8] * steps + [16] if objective == "jem" else [8]  # data and samples of the loss in one
    assert forwards == backwards == expected


@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("sampler", [PLAIN.sampler, Refinement(4, 0.7, 0.02, 0.1, 1, True, 0.01)], ids=str)
def test_samples_are_those_of_a_network_that_learns(tmp_path: Path, sampler: Refinement) -> None:
    run, twin = (trainer(tmp_path, replace(PLAIN, sampler=sampler)) for _ in range(2))
    samples = run._sample(16)
    assert samples.dtype == torch.float64
    x, slots = twin.buffer.draw(16)  # type: ignore[union-attr]
    x = x + sampler.init_noise * torch.randn(x.shape, generator=twin.generator) if sampler.init_noise else x
    for _ in range(sampler.steps):
        x = _step(twin, x)
    torch.testing.assert_close(samples, x, rtol=1e-12, atol=1e-12)
    assert torch.equal(buffer(run)[slots[-1]], samples[-1])
    assert torch.equal(run.generator.get_state(), twin.generator.get_state())


def _step(run: Trainer, x: Tensor) -> Tensor:
    """One SGLD step, NCHW, of a network whose parameters require gradients."""
    s = run.settings.sampler
    leaf = x.detach().clone().requires_grad_()
    gradient = torch.autograd.grad(run.network(leaf).logsumexp(1).sum(), [leaf], retain_graph=True)[0]
    if s.gradient_clamp is not None:
        gradient = gradient.clamp(-s.gradient_clamp, s.gradient_clamp)
    moved = x + s.step_size * gradient + s.noise * torch.randn(x.shape, generator=run.generator)
    return moved.clamp(*run.settings.input_range) if s.clamp else moved


@pytest.mark.usefixtures("_double")
def test_iterations_are_those_of_2019(tmp_path: Path) -> None:
    """Three forwards of data, samples and labelled images, and Adam (Grathwohl et al. 2020, algorithm 1)."""
    run, twin = (trainer(tmp_path, PLAIN) for _ in range(2))
    adam = torch.optim.Adam(twin.network.parameters(), PLAIN.learning_rate)
    for _ in range(3):
        figures = run._iterate()
        pick = torch.randint(len(twin.images), (PLAIN.batch_size,), generator=twin.generator)
        images = twin.images[pick]
        images = images + PLAIN.data_noise * torch.randn(images.shape, generator=twin.generator)
        samples, slots = twin.buffer.draw(PLAIN.batch_size)  # type: ignore[union-attr]
        for _ in range(PLAIN.sampler.steps):
            samples = _step(twin, samples)
        twin.buffer.put_back(slots, samples)  # type: ignore[union-attr]
        gap = twin.network(images).logsumexp(1).mean() - twin.network(samples).logsumexp(1).mean()
        cross_entropy = F.cross_entropy(twin.network(images), twin.labels[pick])
        adam.zero_grad()
        (cross_entropy - gap).backward()
        adam.step()
        expected = {"loss": (cross_entropy - gap).item(), "cross_entropy": cross_entropy.item(), "gap": gap.item()}
        assert figures == pytest.approx(expected, rel=1e-8)
    for mine, theirs in zip(run.network.parameters(), twin.network.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(buffer(run), buffer(twin), rtol=1e-8, atol=1e-8)


def test_bf16_sampling_is_near_and_the_rest_float32(tmp_path: Path) -> None:
    run, twin = (trainer(tmp_path, replace(PLAIN, precision=precision)) for precision in ("bf16", "float32"))
    samples, exact = run._sample(32), twin._sample(32)
    assert samples.dtype == torch.float32
    assert not torch.equal(samples, exact)
    starts, _ = trainer(tmp_path, PLAIN).buffer.draw(32)  # type: ignore[union-attr]
    assert (samples - exact).norm() < 0.02 * (exact - starts).norm()
    assert all(torch.isfinite(torch.tensor(v)) for _ in range(3) for v in run._iterate().values())
    assert {p.dtype for p in run.network.parameters()} == {torch.float32}
    assert torch.isfinite(buffer(run)).all()
