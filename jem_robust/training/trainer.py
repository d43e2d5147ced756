"""The trainer: replay-buffer SGLD sampling, one optimizer step, guard, validation, checkpoints, resume."""

import tempfile
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from jem_robust.checkpoints import save_checkpoint
from jem_robust.energy import log_px
from jem_robust.files import replacing
from jem_robust.gradients import quiet
from jem_robust.langevin import refine, score
from jem_robust.precision import has_bf16
from jem_robust.progress import Progress
from jem_robust.training.data import split
from jem_robust.training.guard import DivergenceError, DivergenceGuard
from jem_robust.training.layout import memory_format
from jem_robust.training.objectives import OBJECTIVES
from jem_robust.training.replay import ClassGaussianStarts, ReplayBuffer, UniformStarts
from jem_robust.training.settings import TrainingSettings

__all__ = ["DivergenceError", "Trainer", "TrainingSettings"]

SNAPSHOT_EVERY = 200
STATE_NAME = "training-state.pt"


class Trainer:
    """Trains `network` (network units -> logits) on images (N, C, H, W) in [0, 1] with labels (N,).

    card: what the checkpoint's card says beside settings and metrics (name, architecture, licence...). Files in `out`:
    model.safetensors (best validation accuracy among healthy states) and training-state.pt (for resume).
    Raises DivergenceError after `retries` divergences, where the last good model.safetensors stays, and ValueError or
    TypeError for data that cannot be trained on.
    """

    def __init__(
        self, network: nn.Module, images: Tensor, labels: Tensor, settings: TrainingSettings, out: str | Path,
        card: dict[str, Any], show: bool = True,
    ) -> None:  # fmt: skip
        if settings.precision == "auto":
            device = next((p.device for p in network.parameters()), "cpu")
            settings = replace(settings, precision="bf16" if has_bf16(device) else "float32")
        self.layout = memory_format(network)
        network = network.to(memory_format=self.layout)  # type: ignore[call-overload]
        self.network, self.settings, self.out, self.card, self.show = network, settings, Path(out), card, show
        data = split(images, labels, settings)
        self.images, self.labels, self.validation_images, self.validation_labels = data
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.objective = OBJECTIVES[settings.objective]
        # Weights averaged over the last iterations are what is validated and saved: a low learning rate, the other way
        # to accuracy, leaves the sampler's chains stuck and the energy outruns them.
        self.averaged = AveragedModel(network, avg_fn=partial(_running_mean, settings.averaging))
        self.optimizer = torch.optim.Adam(network.parameters(), settings.learning_rate)
        self.buffer = self._new_buffer() if self.objective.needs_samples else None
        self.guard = DivergenceGuard(settings.gap_limit)
        self.iteration, self.rate_factor, self.divergences, self.best = 0, 1.0, 0, -1.0
        self.metrics: dict[str, float] = {}

    def _new_buffer(self) -> ReplayBuffer:
        s = self.settings
        shape = (self.images.shape[1], self.images.shape[2], self.images.shape[3])
        starts = (
            UniformStarts(shape, s.input_range)
            if s.starts == "uniform"
            else ClassGaussianStarts(self.images, self.labels, s.input_range)
        )
        return ReplayBuffer(starts, s.buffer_size, s.restart, self.generator)

    def fit(self) -> dict[str, float]:
        """Train to the last iteration and return the best checkpoint's metrics. An interrupt saves before it leaves."""
        total = self.settings.iterations
        self.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=self.out).close()  # better an error now than after an hour
        self.guard.keep(self.state())
        with Progress(total, f"training {self.settings.objective}", show=self.show, done=self.iteration) as progress:
            try:
                while self.iteration < total:
                    figures = self._iterate()
                    if not self._is_healthy(figures):
                        self._recover(progress, figures)
                        continue
                    self.iteration += 1
                    if self.iteration % SNAPSHOT_EVERY == 0 and self.guard.calm:
                        self.guard.keep(self.state())
                    if self.iteration % self.settings.validate_every == 0 or self.iteration == total:
                        self._validate_and_save(progress, figures)
                    progress.done = self.iteration - 1
                    progress.advance(
                        1, None, **figures, validation=self.metrics.get("validation_accuracy", float("nan"))
                    )
            except KeyboardInterrupt:
                self.save_state()
                raise
        if self.best < 0:
            raise DivergenceError(
                f"training ended without one healthy validation, energy gap {self.guard.smoothed:+.3g}: "
                "no model was saved; lower the learning rate, train longer or raise gap_limit"
            )
        return self.metrics

    def _iterate(self) -> dict[str, float]:
        s = self.settings
        pick = torch.randint(len(self.images), (s.batch_size,), generator=self.generator)
        images, labels = self.images[pick], self.labels[pick]
        images = images + s.data_noise * torch.randn(images.shape, generator=self.generator)
        samples = self._sample(len(images)) if self.buffer is not None else None
        self.network.train()
        both = images if samples is None else torch.cat([images, samples])
        logits = self.network(both.contiguous(memory_format=self.layout))
        of_samples = logits[len(images) :] if samples is not None else None
        loss, figures = self.objective.loss(logits[: len(images)], labels, of_samples, s.gap_penalty)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for group in self.optimizer.param_groups:
            group["lr"] = s.rate(self.iteration) * self.rate_factor
        self.optimizer.step()
        self.averaged.update_parameters(self.network)
        return {"loss": loss.item(), **figures}

    def _sample(self, count: int) -> Tensor:
        """SGLD from the buffer's states in eval mode, parameters frozen; the samples go back into the buffer."""
        buffer, s = self.buffer, self.settings
        if buffer is None:
            raise RuntimeError("expected a replay buffer, got none: the objective needs no samples")
        states, slots = buffer.draw(count)

        def log_density(x: Tensor) -> Tensor:
            with torch.autocast(x.device.type, torch.bfloat16, enabled=s.precision == "bf16"):
                return log_px(self.network(x.contiguous(memory_format=self.layout)).to(x.dtype))

        def noise(step: int) -> Tensor:
            return torch.randn(states.shape, generator=self.generator)

        with quiet(self.network):
            samples = refine(states, lambda x, _: score(log_density, x), noise, s.sampler, s.input_range)
        buffer.put_back(slots, samples)
        return samples

    def _is_healthy(self, figures: dict[str, float]) -> bool:
        return self._weights_finite() and self.guard.healthy(figures["loss"], figures.get("gap", 0.0))

    def _weights_finite(self) -> bool:
        return all(bool(torch.isfinite(p).all()) for p in self.network.parameters())

    def _recover(self, progress: Progress, figures: dict[str, float]) -> None:
        self.divergences += 1
        seen = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        if self.divergences > self.settings.retries:
            raise DivergenceError(
                f"training diverged {self.divergences} times, last at iteration {self.iteration} ({seen}): "
                "lower the learning rate or take more sampler steps; the last good model is kept"
            )
        at, divergences = self.iteration, self.divergences
        self.load_state(self.guard.go_back())
        self.divergences, self.rate_factor = divergences, self.settings.backoff**divergences
        self.generator.manual_seed(self.settings.seed + 1_000_003 * divergences)
        progress.note(
            f"diverged at iteration {at} ({seen}): back to {self.iteration}, learning rate x {self.rate_factor:.3g}, "
            f"new seed, attempt {divergences} of {self.settings.retries}"
        )

    def accuracy(self) -> float:
        """Share of the validation images the plain classifier (k = 0) gets right."""
        network = self.averaged.module.eval()
        with torch.no_grad():
            hits = [
                (network(x).argmax(1) == y).sum()
                for x, y in zip(self.validation_images.split(500), self.validation_labels.split(500), strict=True)
            ]
        return float(torch.stack(hits).sum()) / len(self.validation_labels)

    def _validate_and_save(self, progress: Progress, figures: dict[str, float]) -> None:
        accuracy = self.accuracy()
        gap = self.guard.smoothed
        progress.note(f"iteration {self.iteration}: validation accuracy {accuracy:.4f}, smoothed gap {gap:+.3f}")
        if not self.guard.calm:
            return
        if accuracy > self.best:
            self.best = accuracy
            self.metrics = {"validation_accuracy": accuracy, "iteration": self.iteration, "gap": gap}
            training = {**asdict(self.settings), "threads": torch.get_num_threads(), "divergences": self.divergences}
            card = {**self.card, "training": training, "metrics": self.metrics}
            save_checkpoint(self.out / "model.safetensors", self.averaged.module, card)
        self.save_state()

    def state(self) -> dict[str, Any]:
        """Everything a resume needs: weights, optimizer, buffer, RNG, counters."""
        return {
            "iteration": self.iteration,
            "rate_factor": self.rate_factor,
            "divergences": self.divergences,
            "best": self.best,
            "metrics": self.metrics,
            "smoothed_gap": self.guard.smoothed,
            "network": self.network.state_dict(),
            "averaged": self.averaged.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "buffer": self.buffer.samples if self.buffer is not None else torch.empty(0),
            "images": len(self.images),
            "settings": {k: str(v) for k, v in asdict(self.settings).items()},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up a state returned by `state`. Best model and metrics found since stay the best."""
        self.iteration, self.rate_factor = state["iteration"], state["rate_factor"]
        self.divergences = state["divergences"]
        if state["best"] > self.best:
            self.best, self.metrics = state["best"], state["metrics"]
        self.guard.smoothed = state["smoothed_gap"]
        self.network.load_state_dict(state["network"])
        self.averaged.load_state_dict(state["averaged"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        if self.buffer is not None:
            self.buffer.samples = state["buffer"]

    def save_state(self) -> None:
        """Write training-state.pt (tensors and numbers only: loads with weights_only=True); a sound state, if need be
        an earlier one, since an interrupt can come while a run is diverging."""
        sound = self.guard.calm and self._weights_finite()
        if self.buffer is not None:
            sound = sound and bool(torch.isfinite(self.buffer.samples).all())
        with replacing(self.out / STATE_NAME) as temporary:
            torch.save(self.state() if sound else self.guard.latest, temporary)

    def resume(self) -> None:
        """Continue from training-state.pt in `out`. Raises ValueError if it is no such file or of another run."""
        path = self.out / STATE_NAME
        if not path.is_file():
            raise ValueError(f"expected {path} to resume from, got no such file: start without resuming")
        try:
            state = torch.load(path, weights_only=True)
            settings, images = state["settings"], state.get("images", len(self.images))
        except Exception as error:  # a damaged pickle can raise anything
            raise ValueError(f"expected a whole training state, got {path}: start without resuming") from error
        mine = {k: str(v) for k, v in asdict(self.settings).items()}
        changed = sorted(k for k in mine if mine[k] != settings.get(k) and k != "iterations")
        changed += ["images"] if images != len(self.images) else []
        if changed:
            raise ValueError(f"expected the settings the run was begun with, got others for {changed}: use the same")
        try:
            self.load_state(state)
        except (RuntimeError, KeyError) as error:
            raise ValueError(
                f"expected {path} to fit this network, got another one's ({error}): use the same"
            ) from error


def _running_mean(decay: float, mean: Tensor, new: Tensor, count: Tensor | int) -> Tensor:
    """Exponential mean whose memory grows with the updates so far, lest the initial weights linger in it."""
    return mean.lerp(new, 1 - min(decay, int(count) / (10 + int(count))))
