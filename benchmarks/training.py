"""A training iteration of a JEM: ours beside the step of 2019, written plainly.

    python benchmarks/training.py                                  # twenty minutes on one idle core
    python benchmarks/training.py --parts speed --repeats 5
    python benchmarks/training.py --parts trajectory --trajectory-network wrn-16-2 --trajectory-batch 64   # four hours

2019: what Grathwohl et al. (2020) describe, in NCHW: 20 SGLD steps through a network whose parameters require
gradients, then log p(x) of data and samples and log p(y|x) of a labelled batch of its own in three forwards, and Adam.
ours: an iteration of `Trainer` with the settings that make it the same (uniform starts, no clamp, gap penalty, mean of
weights), whose labelled batch is the data batch; in float32, and with bf16 sampling, our default where the processor
computes in it.
speed: WRN-16-2, batch 64. trajectory: cross entropy and energy gap over 200 iterations of a smaller network and batch:
an iteration of WRN-16-2 takes ten seconds on a core. First both do three iterations in float64 on the same images,
starts and noise, and their figures and weights are compared; "shared" is 2019 with all that in float32.
"""

import argparse
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from statistics import mean
from tempfile import gettempdir
from typing import Any

import torch
import torch.nn.functional as F
from measure import forward, interleaved, record, table
from torch import Tensor, nn

import jem_robust as jr
from jem_robust.networks import build_network
from jem_robust.precision import has_bf16
from jem_robust.training.trainer import Trainer, TrainingSettings

NETWORKS = {"wrn-16-2": {"depth": 16, "width": 2}, "wrn-10-1": {"depth": 10, "width": 1}}
PARTS = ("speed", "trajectory")
CONTESTANTS = ("2019", "ours", "ours bf16") if has_bf16("cpu") else ("2019", "ours")
FIGURES = ("cross_entropy", "gap")
STEPS = 20
SAME = 1e-9  # relative, after three iterations in float64; Adam divides rounding errors by small gradients


class Plain:
    """The step of 2019 with the data, weights and buffer of a trainer that has not begun.

    seed: of its own draws; None for those of the trainer, whose data are then the labelled batch as well.
    """

    def __init__(self, trainer: Trainer, seed: int | None) -> None:
        self.settings, self.images, self.labels = trainer.settings, trainer.images, trainer.labels
        self.network = deepcopy(trainer.network).to(memory_format=torch.contiguous_format)
        self.buffer = _buffer(trainer).clone()
        self.shared = seed is None
        self.generator = torch.Generator().manual_seed(seed or 0)
        if self.shared:
            self.generator.set_state(trainer.generator.get_state())
        self.optimizer = torch.optim.Adam(self.network.parameters(), self.settings.learning_rate)

    def iterate(self) -> dict[str, float]:
        """One iteration; its cross entropy and gap."""
        images, labels = self._batch()
        labelled, labels = (images, labels) if self.shared else self._batch()
        samples = self._sample()
        gap = self.network(images).logsumexp(1).mean() - self.network(samples).logsumexp(1).mean()
        cross_entropy = F.cross_entropy(self.network(labelled), labels)
        self.optimizer.zero_grad()
        (cross_entropy - gap).backward()
        self.optimizer.step()
        return {"cross_entropy": cross_entropy.item(), "gap": gap.item()}

    def _batch(self) -> tuple[Tensor, Tensor]:
        pick = torch.randint(len(self.images), (self.settings.batch_size,), generator=self.generator)
        noise = torch.randn(len(pick), *self.images.shape[1:], generator=self.generator)
        return self.images[pick] + self.settings.data_noise * noise, self.labels[pick]

    def _sample(self) -> Tensor:
        count, (low, high) = self.settings.batch_size, self.settings.input_range
        slots = torch.randint(len(self.buffer), (count,), generator=self.generator)
        fresh = torch.rand(count, generator=self.generator) < self.settings.restart
        x = self.buffer[slots]
        new = torch.rand(int(fresh.sum()), *x.shape[1:], generator=self.generator)
        x[fresh] = low + (high - low) * new
        x.requires_grad_()
        self.network.eval()
        for _ in range(self.settings.sampler.steps):
            log_density = self.network(x).logsumexp(1).sum()
            gradient = torch.autograd.grad(log_density, [x], retain_graph=True)[0]
            noise = torch.randn(x.shape, generator=self.generator)
            x.data += self.settings.sampler.step_size * gradient + self.settings.sampler.noise * noise
        self.network.train()
        samples = x.detach()
        for slot, sample in zip(slots.tolist(), samples, strict=True):
            self.buffer[slot] = sample
        return samples


class Rows:
    """Images that go through a network, forwards and backwards."""

    def __init__(self, network: nn.Module) -> None:
        self.forwards = self.backwards = 0
        network.register_forward_hook(self._count)

    def _count(self, network: nn.Module, inputs: Any, logits: Tensor) -> None:
        self.forwards += len(logits)
        if logits.requires_grad:
            logits.register_hook(self._count_backward)

    def _count_backward(self, gradient: Tensor) -> None:
        self.backwards += len(gradient)


def data(source: str | None) -> tuple[Tensor, Tensor]:
    """Images (N, 3, 32, 32) in [0, 1] and labels to train on; by default the embedded ones, padded, as colours."""
    if source:
        return jr.load_images(source, limit=5000, split="train")
    images, labels = jr.load_images("fashion-mnist")
    return F.pad(images, (2, 2, 2, 2)).expand(-1, 3, -1, -1), labels


def trainer(network: str, source: tuple[Tensor, Tensor], seed: int, precision: str, **changes: Any) -> Trainer:
    """Ours, set up for what the step of 2019 computes."""
    settings = TrainingSettings(
        learning_rate=1e-4, warmup=0, drops=(), data_noise=0.03, starts="uniform", buffer_size=10_000, restart=0.05,
        sampler=jr.Refinement(STEPS, 1.0, 0.01, chains=1), precision=precision, validation_images=100,
        gap_penalty=0.0, averaging=0.0, seed=seed,
    )  # fmt: skip
    torch.manual_seed(seed)
    net = build_network("wide-resnet", **NETWORKS[network]).to(torch.get_default_dtype())
    net = net.to(memory_format=torch.channels_last)
    changed = TrainingSettings(**{**vars(settings), **changes})
    return Trainer(net, *source, changed, Path(gettempdir()), {}, show=False)


def contestant(name: str, run: Trainer, own_seed: int) -> tuple[nn.Module, Callable[[], dict[str, float]]]:
    """Its network, and one iteration of it."""
    if name.startswith("ours"):
        return run.network, run._iterate
    plain = Plain(run, None if name == "shared" else own_seed)
    return plain.network, plain.iterate


def precision(name: str) -> str:
    return "bf16" if name.endswith("bf16") else "float32"


def compare(network: str, source: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Largest relative differences of figures and weights after three iterations in float64 with the same draws."""
    torch.set_default_dtype(torch.float64)
    try:
        small = jr.Refinement(3, 1.0, 0.01, chains=1)
        ours = trainer(network, source, 0, "float32", batch_size=4, buffer_size=20, restart=0.3, sampler=small)
        plain = Plain(ours, None)
        figures = [(ours._iterate(), plain.iterate()) for _ in range(3)]
    finally:
        torch.set_default_dtype(torch.float32)
    pairs = list(zip(*(n.state_dict().values() for n in (ours.network, plain.network)), strict=True))
    found = {name: max(abs(a[name] / b[name] - 1) for a, b in figures) for name in FIGURES}
    found["weights"] = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    found["buffer"] = float((_buffer(ours) - plain.buffer).abs().max())
    if not max(found.values()) < SAME:
        raise RuntimeError(f"expected the same iterations, got relative differences {found}")
    return found


def _buffer(run: Trainer) -> Tensor:
    if run.buffer is None:
        raise RuntimeError("expected a replay buffer, got none")
    return run.buffer.samples


def speed(network: str, source: tuple[Tensor, Tensor], batch: int, repeats: int) -> list[dict[str, Any]]:
    """Rows of time and work of one iteration."""
    runs, rows = {}, {}
    for name in CONTESTANTS:
        net, runs[name] = contestant(name, trainer(network, source, 0, precision(name), batch_size=batch), 1)
        rows[name] = Rows(net)
        runs[name]()
        rows[name] = deepcopy(rows[name])
    net = build_network("wide-resnet", **NETWORKS[network])
    seconds = interleaved({"F": forward(net, torch.rand(batch, 3, 32, 32)), **runs}, repeats)
    return [
        {
            "network": network, "batch": batch, "contestant": name, "iterations/s": 1 / seconds[name],
            "2019/this": round(seconds["2019"] / seconds[name], 2), "F": round(seconds[name] / seconds["F"], 1),
            "forwards/batch": rows[name].forwards / batch, "backwards/batch": rows[name].backwards / batch,
        }
        for name in CONTESTANTS
    ]  # fmt: skip


def trajectory(
    network: str, source: tuple[Tensor, Tensor], batch: int, iterations: int, seeds: int, rate: float
) -> list[dict[str, Any]]:
    """Rows of mean figures over seeds, each of a tenth of the iterations.

    spread: largest range of one contestant's seeds. shared: mean difference of ours and 2019 on the same draws.
    """
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for seed in range(seeds):
        for name in (*CONTESTANTS, "shared") if seed == 0 else CONTESTANTS:
            run = trainer(network, source, seed, precision(name), batch_size=batch, learning_rate=rate)
            _, iterate = contestant(name, run, 1000 + seed)
            found[name, seed] = [iterate() for _ in range(iterations)]
            print(f"{name}, seed {seed}: last {found[name, seed][-1]}", flush=True)
    size = max(1, iterations // 10)
    rows = []
    for figure in FIGURES:
        for begin in range(0, iterations, size):
            block = {k: [v[figure] for v in values[begin : begin + size]] for k, values in found.items()}
            means = {name: [mean(block[name, s]) for s in range(seeds)] for name in CONTESTANTS}
            off = [abs(a - b) for a, b in zip(block["ours", 0], block["shared", 0], strict=True)]
            rows.append(
                {
                    "network": network, "batch": batch, "rate": rate, "seeds": seeds, "figure": figure,
                    "iterations": f"{begin + 1}-{min(begin + size, iterations)}",
                    **{name: mean(values) for name, values in means.items()},
                    "spread": max(max(values) - min(values) for values in means.values()), "shared": mean(off),
                }
            )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated, of %(default)s")
    parser.add_argument("--data", help="training set of 3x32x32 images that `load_images` reads")
    parser.add_argument("--network", choices=NETWORKS, default="wrn-16-2")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trajectory-network", choices=NETWORKS, default="wrn-10-1")
    parser.add_argument("--trajectory-batch", type=int, default=16)
    parser.add_argument("--trajectory-steps", type=int, default=200, help="iterations")
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="of trajectories")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    source = data(given.data)
    differences = compare(given.network, source)
    print("relative differences after 3 iterations in float64:", differences)
    rows: list[dict[str, Any]] = [{"differences": differences}]
    if "speed" in given.parts.split(","):
        rows += (new := speed(given.network, source, given.batch, given.repeats))
        table(new)
    if "trajectory" in given.parts.split(","):
        sizes = given.trajectory_batch, given.trajectory_steps, given.seeds
        rows += (new := trajectory(given.trajectory_network, source, *sizes, given.learning_rate))
        table(new)
    record("training", rows)


if __name__ == "__main__":
    main()
