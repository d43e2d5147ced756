"""The trainer: replay-buffer SGLD sampling, one optimizer step, guard, validation, checkpoints, resume."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jem_robust.checkpoints import save_checkpoint
from jem_robust.energy import log_px
from jem_robust.files import replacing
from jem_robust.langevin import Refinement, refine, score
from jem_robust.progress import Progress
from jem_robust.training.guard import DivergenceError, DivergenceGuard
from jem_robust.training.objectives import OBJECTIVES
from jem_robust.training.replay import ClassGaussianStarts, ReplayBuffer, UniformStarts

SNAPSHOT_EVERY = 200
STATE_NAME = "training-state.pt"


@dataclass(frozen=True)
class TrainingSettings:
    """All that decides a training run; goes into the checkpoint's card.

    objective: "jem" (log p(y|x) + log p(x)) or "ce". data_noise: standard deviation of the noise on training images,
    sampler: SGLD chain per iteration, both in network units. warmup: iterations of linear rise of the learning rate.
    drops: (share of iterations, factor on the learning rate) pairs. restart: share of chains begun afresh.
    precision: "bf16" or "float32" for sampling. gap_limit, retries, backoff: see DivergenceGuard; after a divergence
    the learning rate is multiplied by backoff, at most `retries` times.
    """

    objective: str = "jem"
    iterations: int = 4000
    batch_size: int = 64
    learning_rate: float = 5e-4
    warmup: int = 500
    drops: tuple[tuple[float, float], ...] = ((0.6, 0.3), (0.85, 0.1))
    data_noise: float = 0.05
    starts: str = "class-gaussian"
    buffer_size: int = 10_000
    restart: float = 0.05
    sampler: Refinement = field(default_factory=lambda: Refinement(10, 1.0, 0.01, chains=1, clamp=True))
    input_range: tuple[float, float] = (-1.0, 1.0)
    precision: str = "bf16"
    validation_images: int = 5000
    validate_every: int = 500
    gap_limit: float = 3.0
    retries: int = 3
    backoff: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        choices = {"objective": tuple(OBJECTIVES), "starts": ("class-gaussian", "uniform"), "precision": ("bf16", "float32")}  # fmt: skip
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"expected {name} out of {allowed}, got {getattr(self, name)!r}")
        for name in ("iterations", "batch_size", "buffer_size", "validation_images", "validate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} of at least 1, got {getattr(self, name)}")

    def rate(self, iteration: int) -> float:
        """Learning rate of an iteration, counted from 0."""
        factor = min(1.0, (iteration + 1) / self.warmup) if self.warmup else 1.0
        passed = [f for share, f in self.drops if iteration >= share * self.iterations]
        return self.learning_rate * factor * (passed[-1] if passed else 1.0)


class Trainer:
    """Trains `network` (network units -> logits) on images (N, C, H, W) in [0, 1] with labels (N,).

    card: what the checkpoint's card says beside settings and metrics (name, architecture, licence...). Files in `out`:
    model.safetensors (best validation accuracy among healthy states) and training-state.pt (for resume).
    Raises DivergenceError after `retries` divergences; the last good model.safetensors stays.
    """

    def __init__(
        self, network: nn.Module, images: Tensor, labels: Tensor, settings: TrainingSettings, out: str | Path,
        card: dict[str, Any], show: bool = True,
    ) -> None:  # fmt: skip
        self.network, self.settings, self.out, self.card, self.show = network, settings, Path(out), card, show
        if len(images) <= settings.validation_images:
            raise ValueError(
                f"expected more than {settings.validation_images} images to hold that many back for validation, got {len(images)}"
            )
        low, high = settings.input_range
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(settings.seed))
        held, kept = order[: settings.validation_images], order[settings.validation_images :]
        scaled = low + (high - low) * images
        self.images, self.labels = scaled[kept], labels[kept]
        self.validation_images, self.validation_labels = scaled[held], labels[held]
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.objective = OBJECTIVES[settings.objective]
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
                    progress.advance(1, **figures, validation=self.metrics.get("validation_accuracy", float("nan")))
            except KeyboardInterrupt:
                self.save_state()
                raise
        return self.metrics

    def _iterate(self) -> dict[str, float]:
        s = self.settings
        pick = torch.randint(len(self.images), (s.batch_size,), generator=self.generator)
        images, labels = self.images[pick], self.labels[pick]
        images = images + s.data_noise * torch.randn(images.shape, generator=self.generator)
        samples = self._sample(len(images)) if self.buffer is not None else None
        self.network.train()
        both = images if samples is None else torch.cat([images, samples])
        logits = self.network(both.contiguous(memory_format=torch.channels_last))
        loss, figures = self.objective.loss(
            logits[: len(images)], labels, logits[len(images) :] if samples is not None else None
        )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        for group in self.optimizer.param_groups:
            group["lr"] = s.rate(self.iteration) * self.rate_factor
        self.optimizer.step()
        return {"loss": loss.item(), **figures}

    def _sample(self, count: int) -> Tensor:
        """SGLD from the buffer's states in eval mode; the samples go back into the buffer."""
        buffer, s = self.buffer, self.settings
        if buffer is None:
            raise RuntimeError("expected a replay buffer, got none: the objective needs no samples")
        self.network.eval()
        states, slots = buffer.draw(count)

        def log_density(x: Tensor) -> Tensor:
            with torch.autocast(x.device.type, torch.bfloat16, enabled=s.precision == "bf16"):
                return log_px(self.network(x.contiguous(memory_format=torch.channels_last)).float())

        samples = refine(
            states,
            lambda x, _: score(log_density, x),
            lambda t: torch.randn(states.shape, generator=self.generator),
            s.sampler,
            s.input_range,
        )
        buffer.put_back(slots, samples)
        return samples

    def _is_healthy(self, figures: dict[str, float]) -> bool:
        weights_finite = all(bool(torch.isfinite(p).all()) for p in self.network.parameters())
        return weights_finite and self.guard.healthy(figures["loss"], figures.get("gap", 0.0))

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
        self.network.eval()
        with torch.no_grad():
            hits = [
                (self.network(x).argmax(1) == y).sum()
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
            save_checkpoint(self.out / "model.safetensors", self.network, {**self.card, "training": training, "metrics": self.metrics})  # fmt: skip
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
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "buffer": self.buffer.samples if self.buffer is not None else torch.empty(0),
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
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        if self.buffer is not None:
            self.buffer.samples = state["buffer"]

    def save_state(self) -> None:
        """Write training-state.pt (tensors and numbers only: loads with weights_only=True)."""
        with replacing(self.out / STATE_NAME) as temporary:
            torch.save(self.state(), temporary)

    def resume(self) -> None:
        """Continue from training-state.pt in `out`. Raises ValueError if it belongs to other settings."""
        path = self.out / STATE_NAME
        if not path.exists():
            raise ValueError(f"expected {path} to resume from, got no such file: start without resuming")
        state = torch.load(path, weights_only=True)
        mine = {k: str(v) for k, v in asdict(self.settings).items()}
        changed = sorted(k for k in mine if mine[k] != state["settings"].get(k) and k != "iterations")
        if changed:
            raise ValueError(f"expected the settings the run was begun with, got others for {changed}: use the same")
        self.load_state(state)
