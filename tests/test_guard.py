"""The divergence guard: what it calls healthy, what it keeps, and how a trainer goes back with it."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jem_robust.checkpoints import read_card
from jem_robust.training import trainer as module
from jem_robust.training.guard import DivergenceError, DivergenceGuard
from jem_robust.training.trainer import STATE_NAME, Trainer
from tests.small_training import MODEL, QUICK, same, stop_after, trainer


@pytest.mark.parametrize(("loss", "gap"), [(math.nan, 0.0), (math.inf, 0.0), (1.0, math.nan), (1.0, -math.inf)])
def test_not_finite_is_divergence_whatever_the_limit(loss: float, gap: float) -> None:
    guard = DivergenceGuard(math.inf)
    assert not guard.healthy(loss, gap)
    assert guard.smoothed == 0
    assert guard.healthy(1.0, 0.5)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_gap_that_leaves_its_range(sign: int) -> None:
    guard = DivergenceGuard(3.0)
    assert not guard.healthy(0.0, sign * 12.1)  # one wild iteration
    guard = DivergenceGuard(3.0)
    steps = next(i for i in range(1, 200) if not guard.healthy(0.0, sign * 4.0))
    # 4 (1 - .95^n) > 3 first at n = 28; not calm any more from 1.5 on, at n = 10.
    assert steps == 28
    guard = DivergenceGuard(3.0)
    calm = [guard.healthy(0.0, sign * 4.0) and guard.calm for _ in range(10)]
    assert calm == [True] * 9 + [False]


def test_a_gap_within_its_range_is_fine() -> None:
    guard = DivergenceGuard(3.0)
    assert all(guard.healthy(1.0, 2.9 * (-1) ** i) for i in range(500))
    assert guard.calm


def test_goes_back_to_a_copy_of_the_oldest_state() -> None:
    guard = DivergenceGuard(3.0)
    weights = torch.zeros(2)
    for i in range(4):
        weights.fill_(i)
        guard.keep({"w": weights})
    assert guard.latest["w"].tolist() == [3, 3]
    guard.smoothed = 2.0
    back = guard.go_back()
    assert back["w"].tolist() == [2, 2]
    assert guard.smoothed == 0
    back["w"].fill_(99)
    assert guard.go_back()["w"].tolist() == guard.latest["w"].tolist() == [2, 2]


# In a trainer


def poison(run: Trainer, at: int, times: int = 10**9) -> list[dict[str, Any]]:
    """Make the weights NaN at an iteration, as often as told; returns what the run looked like right before."""
    iterate, seen = run._iterate, list[dict[str, Any]]()

    def poisoned() -> dict[str, float]:
        if run.iteration == at and len(seen) < times:
            seen.append({"rate": run.rate_factor, "generator": run.generator.get_state()})
            with torch.no_grad():
                next(run.network.parameters()).fill_(torch.nan)
        return iterate()

    run._iterate = poisoned  # type: ignore[method-assign]
    return seen


@pytest.fixture(autouse=True)
def _frequent_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SNAPSHOT_EVERY", 10)


def test_rolls_back_and_finishes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trainer(tmp_path)
    run.show = True
    seen = poison(run, 35, times=2)
    metrics = run.fit()
    assert metrics["validation_accuracy"] > 0.9
    assert run.iteration == 60
    assert [s["rate"] for s in seen] == [1, 0.5]
    assert run.rate_factor == 0.25
    assert not torch.equal(seen[0]["generator"], seen[1]["generator"])
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(QUICK.rate(59) * 0.25)
    assert all(torch.isfinite(p).all() for p in run.network.parameters())
    assert read_card(tmp_path / MODEL)["training"]["divergences"] in (0, 2)
    assert "diverged at iteration 35" in capsys.readouterr().err


def test_roll_back_restores_weights_optimizer_and_buffer(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    kept: dict[str, Any] = {}
    keep = run.guard.keep

    def spying(state: dict[str, Any]) -> None:
        keep(state)
        kept[str(state["iteration"])] = run.guard.latest

    run.guard.keep = spying  # type: ignore[method-assign]
    poison(run, 35, times=1)
    recover = run._recover

    def checking(progress: Any, figures: dict[str, float]) -> None:
        recover(progress, figures)
        expected, now = kept["20"], run.state()  # the older of the two snapshots, 20 and 30
        assert now["iteration"] == 20
        assert same(now["network"], expected["network"])
        assert torch.equal(now["buffer"], expected["buffer"])
        moments, expected_moments = now["optimizer"]["state"], expected["optimizer"]["state"]
        assert all(same(moments[i], expected_moments[i]) for i in expected_moments)
        assert not torch.equal(now["generator"], expected["generator"])
        raise KeyboardInterrupt

    run._recover = checking  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run.fit()


def test_gives_up_with_the_last_good_model_in_place(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    poison(run, 35)
    with pytest.raises(DivergenceError, match="diverged 4 times, last at iteration 35"):
        run.fit()
    card = read_card(tmp_path / MODEL)
    assert card["metrics"]["iteration"] == 20
    assert all(torch.isfinite(v).all() for v in weights_of(tmp_path / MODEL).values())
    state = torch.load(tmp_path / STATE_NAME, weights_only=True)
    assert state["iteration"] == 20
    assert all(torch.isfinite(v).all() for v in state["network"].values())


def weights_of(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def test_a_gap_out_of_its_range_is_divergence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(tmp_path, replace(QUICK, gap_limit=1.0, retries=0, sampler=replace(QUICK.sampler, steps=0)))
    iterate = run._iterate
    monkeypatch.setattr(run, "_iterate", lambda: {**iterate(), "gap": 0.0 if run.iteration < 30 else 1.5})
    with pytest.raises(DivergenceError, match=r"diverged 1 times, last at iteration (4|5)\d .*gap 1.5"):
        run.fit()
    assert read_card(tmp_path / MODEL)["metrics"]["iteration"] == 20  # at 40 the gap was on its way out already


def test_an_ill_end_saves_nothing_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(tmp_path, replace(QUICK, gap_limit=1.0))
    iterate = run._iterate
    monkeypatch.setattr(run, "_iterate", lambda: {**iterate(), "gap": 0.95})
    with pytest.raises(DivergenceError, match="without one healthy validation"):
        run.fit()
    assert not (tmp_path / MODEL).exists()


@pytest.mark.parametrize("ill", ["weights", "buffer", "gap"])
def test_an_interrupt_saves_a_sound_state(tmp_path: Path, ill: str) -> None:
    run = trainer(tmp_path)
    iterate = run._iterate

    def interrupted() -> dict[str, float]:
        if run.iteration < 35:
            return iterate()
        if ill == "weights":
            with torch.no_grad():
                next(run.network.parameters()).fill_(torch.nan)
        elif ill == "buffer" and run.buffer is not None:
            run.buffer.samples[3] = torch.inf
        else:
            run.guard.smoothed = 60.0
        raise KeyboardInterrupt

    run._iterate = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run.fit()
    again = trainer(tmp_path)
    again.resume()
    assert again.iteration == 30
    assert again.fit()["iteration"] <= 60
    assert again.divergences == 0


def test_other_errors_leave_the_last_good_files(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    stop_after(run, 35, MemoryError)
    with pytest.raises(MemoryError):
        run.fit()
    assert read_card(tmp_path / MODEL)["metrics"]["iteration"] == 20
    assert torch.load(tmp_path / STATE_NAME, weights_only=True)["iteration"] == 20
