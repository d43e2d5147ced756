"""The trainer on data that is learnt in seconds: what it computes, saves and refuses."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from jem_robust.checkpoints import load_checkpoint, read_card
from jem_robust.langevin import Refinement
from jem_robust.networks.small import SmallResNet
from jem_robust.training.objectives import OBJECTIVES
from jem_robust.training.run import evaluation_refinement, train
from jem_robust.training.trainer import STATE_NAME, Trainer
from tests.small_training import MODEL, QUICK, data, same, stop_after, train_network, trainer, weights

# Settings


def test_schedule() -> None:
    settings = replace(QUICK, iterations=100, learning_rate=1.0, warmup=4, drops=((0.85, 0.1), (0.6, 0.3)))
    assert [settings.rate(i) for i in (0, 1, 3, 4, 59)] == [0.25, 0.5, 1, 1, 1]
    assert [settings.rate(i) for i in (60, 84, 85, 99)] == [0.3, 0.3, 0.1, 0.1]
    assert replace(QUICK, warmup=0, learning_rate=0.5, drops=()).rate(0) == 0.5


@pytest.mark.parametrize(
    "settings",
    [
        {"objective": "gan"}, {"starts": "zeros"}, {"precision": "fp8"}, {"iterations": 0}, {"iterations": 2.5},
        {"batch_size": -1}, {"buffer_size": 0}, {"validation_images": 0}, {"validate_every": 0}, {"warmup": -1},
        {"learning_rate": -1e-3}, {"learning_rate": 0}, {"learning_rate": math.nan}, {"learning_rate": "1e-3"},
        {"data_noise": -0.1}, {"restart": 1.5}, {"restart": -0.1}, {"gap_limit": 0}, {"gap_limit": math.nan},
        {"gap_penalty": -1}, {"averaging": 1.5},
        {"retries": -1}, {"backoff": 0}, {"backoff": 2}, {"input_range": (1.0, -1.0)}, {"input_range": (0.0, math.inf)},
        {"drops": ((0.5,),)}, {"drops": ((0.5, -1.0),)}, {"seed": 1.5}, {"batch_size": True},
    ],
)  # fmt: skip
def test_bad_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=f"expected .*{next(iter(settings)).replace('_', '.')}|expected (an input|drops)"
    ):
        replace(QUICK, **settings)


def test_lists_are_the_same_settings() -> None:
    assert replace(QUICK, input_range=[-1.0, 1.0], drops=[[0.8, 0.5]]) == QUICK  # type: ignore[arg-type]


def test_bad_data(tmp_path: Path) -> None:
    images, labels = data()

    def check(images: Any, labels: Any, message: str, error: type[Exception] = ValueError, **changes: Any) -> None:
        with pytest.raises(error, match=message):
            train(images, labels, replace(QUICK, **changes), tmp_path, width=2, show=False)

    check(images, labels, "expected more than 300 images", validation_images=300)
    check(images[:0], labels[:0], "expected more than 50 images")
    check(images, labels * 2, r"of every class, got none of \[1\]: renumber")
    check(images, labels + 1, r"got none of \[0\]")
    check(images, labels, "a batch size up to the 250 training images, got 251", batch_size=251)
    check(images, labels[:10], "expected 300 labels")
    check(images, labels - 1, "expected labels from 0")
    check(images, labels.float(), "expected integer labels", TypeError)
    check(images * 2, labels, r"expected images in \[0, 1\]")
    check(images * torch.nan, labels, "NaN")
    check((images * 255).to(torch.uint8), labels, "divide by 255", TypeError)
    check(images[:, 0], labels, r"shape \(N, C, H, W\)")
    with pytest.raises(ValueError, match="expected an architecture out of"):
        train(images, labels, QUICK, tmp_path, architecture="vgg", show=False)
    with pytest.raises(ValueError, match="settings that make a small-resnet"):
        train(images, labels, QUICK, tmp_path, width=-1, show=False)
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_cannot_be_written_is_seen_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    run = trainer(tmp_path / "file" / "out")
    monkeypatch.setattr(run, "_iterate", lambda: pytest.fail("computed first"))
    with pytest.raises(OSError):  # noqa: PT011
        run.fit()


# Objectives


@pytest.mark.parametrize("penalty", [0.0, 0.7])
def test_joint_gradient_by_hand(penalty: float) -> None:
    """d/dz of -log p(y|x): softmax - onehot; of -log p(x): -softmax on data and +softmax on samples; over n each."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(4, 3, generator=generator, dtype=torch.float64).requires_grad_()
    s = torch.randn(5, 3, generator=generator, dtype=torch.float64).requires_grad_()
    y = torch.tensor([0, 1, 2, 1])
    loss, figures = OBJECTIVES["jem"].loss(z, y, s, penalty)
    on_data, on_samples = torch.autograd.grad(loss, (z, s))
    p, q = z.detach().exp(), s.detach().exp()
    gap = float(p.sum(1).log().mean() - q.sum(1).log().mean())
    p, q = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
    onehot = torch.eye(3, dtype=torch.float64)[y]
    pull = 1 - 2 * penalty * gap
    torch.testing.assert_close(on_data, (p - onehot) / 4 - pull * p / 4)
    torch.testing.assert_close(on_samples, pull * q / 5)
    cross_entropy = float(-(p * onehot).sum(1).log().mean())
    assert loss.item() == pytest.approx(cross_entropy - gap + penalty * gap**2)
    assert figures == pytest.approx({"cross_entropy": cross_entropy, "gap": gap})
    with pytest.raises(ValueError, match="expected logits of samples"):
        OBJECTIVES["jem"].loss(z, y, None, penalty)


def test_ce_gradient() -> None:
    z = torch.zeros(2, 2, requires_grad=True)
    loss, figures = OBJECTIVES["ce"].loss(z, torch.tensor([0, 1]), None, 1.0)
    (gradient,) = torch.autograd.grad(loss, z)
    torch.testing.assert_close(gradient, torch.tensor([[-0.25, 0.25], [0.25, -0.25]]))
    assert figures == pytest.approx({"cross_entropy": math.log(2)})


def test_one_iteration_is_one_adam_step(tmp_path: Path) -> None:
    run = trainer(tmp_path, replace(QUICK, objective="ce", data_noise=0.0, warmup=1, drops=()))
    before = [p.detach().clone() for p in run.network.parameters()]
    run._iterate()
    moved = [(p - b).abs() for p, b in zip(run.network.parameters(), before, strict=True)]
    gradients = [p.grad for p in run.network.parameters()]
    for step, gradient in zip(moved, gradients, strict=True):  # Adam's first step is the rate wherever |g| >> 1e-8
        assert gradient is not None
        assert torch.allclose(step[gradient.abs() > 1e-4], torch.tensor(1e-2), rtol=1e-2)


def test_sampling_is_in_eval_mode_and_goes_back_into_the_buffer(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    assert run.buffer is not None
    modes: list[bool] = []
    run.network.register_forward_pre_hook(lambda m, _: modes.append(m.training))
    before = run.buffer.samples.clone()
    samples = run._sample(16)
    assert modes == [False] * 3
    assert samples.min() >= -1
    assert samples.max() <= 1
    changed = (run.buffer.samples != before).flatten(1).any(1)
    assert 10 <= int(changed.sum()) <= 16
    assert all(bool((run.buffer.samples[changed] == s).flatten(1).all(1).any()) for s in samples[-1:])


# Whole runs


def test_split_does_not_overlap(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    assert (len(run.images), len(run.validation_images)) == (250, 50)
    parts = torch.cat([run.images, run.validation_images]).flatten(1)
    assert len({tuple(row) for row in parts.tolist()}) == 300
    torch.testing.assert_close(parts.sort(0).values, (2 * data()[0] - 1).flatten(1).sort(0).values)
    assert torch.equal(trainer(tmp_path).validation_images, run.validation_images)
    assert not torch.equal(trainer(tmp_path, replace(QUICK, seed=1)).validation_images, run.validation_images)


@pytest.mark.parametrize(
    "changes", [{"objective": "jem"}, {"objective": "ce"}, {"starts": "uniform", "precision": "bf16"}]
)
def test_learns(tmp_path: Path, changes: dict[str, Any]) -> None:
    settings = replace(QUICK, **changes)
    state = torch.get_rng_state()
    images, labels = data()
    originals = images.clone(), labels.clone()
    metrics = train(images, labels, settings, tmp_path, width=4, about={"name": "tiny"}, show=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(images, originals[0])
    assert torch.equal(labels, originals[1])
    network, card = load_checkpoint(tmp_path / MODEL)
    fresh, truth = data(200, seed=9)
    assert float((network(2 * fresh - 1).argmax(1) == truth).double().mean()) > 0.9
    assert metrics["validation_accuracy"] > 0.9
    assert card["metrics"] == metrics
    assert card["name"] == "tiny"
    assert card["training"]["objective"] == settings.objective
    assert card["architecture"] == {"name": "small-resnet", "channels": 1, "num_classes": 2, "width": 4}
    assert (card["input_shape"], card["input_range"], card["num_classes"]) == ([1, 8, 8], [-1, 1], 2)
    assert Refinement(**card["refinement"]) == evaluation_refinement(settings)
    assert sorted(p.name for p in tmp_path.iterdir()) == [MODEL, STATE_NAME]


def test_two_runs_with_one_seed_are_the_same(tmp_path: Path) -> None:
    settings = replace(QUICK, iterations=20)
    for name, noise in (("a", 1), ("b", 2)):
        with torch.random.fork_rng():
            torch.manual_seed(noise)
            train(*data(), settings, tmp_path / name, width=2, show=False)
    assert same(weights(tmp_path / "a" / MODEL), weights(tmp_path / "b" / MODEL))
    train(*data(), replace(settings, seed=1), tmp_path / "c", width=2, show=False)
    assert not same(weights(tmp_path / "a" / MODEL), weights(tmp_path / "c" / MODEL))


def test_resume_gives_what_one_run_gives(tmp_path: Path) -> None:
    settings = replace(QUICK, iterations=40)
    train(*data(), settings, tmp_path / "whole", width=2, show=False)
    # The same schedule stopped half way: as an interrupt right after an iteration leaves it.
    card = read_card(tmp_path / "whole" / MODEL)
    part = Trainer(train_network(settings), *data(), settings, tmp_path / "part", card, show=False)
    stop_after(part, 20)
    with pytest.raises(KeyboardInterrupt):
        part.fit()
    assert torch.load(tmp_path / "part" / STATE_NAME, weights_only=True)["iteration"] == 20
    train(*data(), settings, tmp_path / "part", width=2, resume=True, show=False)
    states = [torch.load(tmp_path / name / STATE_NAME, weights_only=True) for name in ("whole", "part")]
    assert same(states[0]["network"], states[1]["network"])
    assert same(states[0]["averaged"], states[1]["averaged"])
    assert torch.equal(states[0]["buffer"], states[1]["buffer"])
    assert states[0]["metrics"] == states[1]["metrics"]


def test_a_running_mean_of_the_weights_is_saved(tmp_path: Path) -> None:
    settings = replace(QUICK, iterations=20, averaging=0.9)
    run = trainer(tmp_path, settings)
    iterate, seen = run._iterate, []

    def watched() -> dict[str, float]:
        figures = iterate()
        seen.append(run.network.head.weight.detach().clone())  # type: ignore[union-attr,operator]
        return figures

    run._iterate = watched  # type: ignore[method-assign]
    run.fit()
    mean = seen[0]
    for count, new in enumerate(seen[1:], 1):
        decay = min(0.9, count / (10 + count))
        mean = decay * mean + (1 - decay) * new
    saved = weights(tmp_path / MODEL)["head.weight"]
    torch.testing.assert_close(saved, mean)
    assert not torch.allclose(saved, seen[-1])


def test_without_averaging_the_last_weights_are_saved(tmp_path: Path) -> None:
    run = trainer(tmp_path, replace(QUICK, iterations=20, averaging=0.0))
    run.fit()
    assert same(weights(tmp_path / MODEL), run.network.state_dict())


def test_resume_refuses_what_does_not_belong(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="to resume from, got no such file"):
        trainer(tmp_path).resume()
    settings = replace(QUICK, iterations=5)
    trainer(tmp_path, settings).fit()
    with pytest.raises(ValueError, match=r"got others for \['batch_size', 'learning_rate'\]"):
        trainer(tmp_path, replace(settings, batch_size=16, learning_rate=1e-3)).resume()
    with pytest.raises(ValueError, match=r"got others for \['images'\]"):
        Trainer(SmallResNet(1, 2, 2), *data(299), settings, tmp_path, {}, show=False).resume()
    with pytest.raises(ValueError, match=r"to fit this network, got another one's \((.|\n)*size mismatch"):
        Trainer(SmallResNet(1, 2, 3), *data(), settings, tmp_path, {}, show=False).resume()
    longer = trainer(tmp_path, replace(settings, iterations=7))
    longer.resume()
    assert longer.iteration == 5
    assert longer.best > 0
    for content in (b"", b"junk", (tmp_path / STATE_NAME).read_bytes()[:5000]):
        (tmp_path / STATE_NAME).write_bytes(content)
        with pytest.raises(ValueError, match="expected a whole training state"):
            trainer(tmp_path, settings).resume()
    torch.save({"model_state_dict": {}}, tmp_path / STATE_NAME)
    with pytest.raises(ValueError, match="expected a whole training state"):
        trainer(tmp_path, settings).resume()


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    metrics = trainer(tmp_path).fit()
    before = (tmp_path / MODEL).read_bytes()
    again = trainer(tmp_path)
    again.resume()
    assert again.fit() == metrics
    assert (tmp_path / MODEL).read_bytes() == before
