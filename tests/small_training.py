"""Data that is learnt in seconds, and trainers for it."""

from pathlib import Path

import torch
from torch import Tensor, nn

from jem_robust.checkpoints import load_checkpoint
from jem_robust.langevin import Refinement
from jem_robust.networks.small import SmallResNet
from jem_robust.training.trainer import Trainer, TrainingSettings

QUICK = TrainingSettings(
    iterations=60, batch_size=32, learning_rate=1e-2, warmup=5, buffer_size=100, validation_images=50,
    validate_every=20, precision="float32", gap_limit=100.0, sampler=Refinement(3, 1.0, 0.01, chains=1, clamp=True),
)  # fmt: skip
MODEL = "model.safetensors"
DESIGN = {"name": "small-resnet", "channels": 1, "num_classes": 2, "width": 2}


def data(n: int = 300, seed: int = 0) -> tuple[Tensor, Tensor]:
    """8x8 images, class 0 bright above and class 1 bright below."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 2
    bright = (torch.arange(8) < 4).float()
    rows = torch.where(labels[:, None] == 0, bright, 1 - bright)
    noise = 0.25 * torch.rand(n, 1, 8, 8, generator=generator)
    return (0.2 + 0.5 * rows[:, None, :, None] + noise).clamp(0, 1), labels


def trainer(out: Path, settings: TrainingSettings = QUICK, seed: int = 0) -> Trainer:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = SmallResNet(1, 2, 2)
    return Trainer(network, *data(), settings, out, {"architecture": DESIGN}, show=False)


def weights(path: Path) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in load_checkpoint(path)[0].state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def train_network(settings: TrainingSettings) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        return SmallResNet(1, 2, 2)


def stop_after(run: Trainer, iterations: int, error: type[BaseException] = KeyboardInterrupt) -> None:
    iterate = run._iterate

    def limited() -> dict[str, float]:
        if run.iteration >= iterations:
            raise error
        return iterate()

    run._iterate = limited  # type: ignore[method-assign]
