"""Where a training chain starts: class Gaussians or uniform noise, and the replay buffer of earlier samples."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class UniformStarts:
    """Uniform noise over the input range: the starts of JEM (Grathwohl et al. 2020)."""

    shape: tuple[int, int, int]
    bounds: tuple[float, float]

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """(count, C, H, W) starts in network units."""
        low, high = self.bounds
        return low + (high - low) * torch.rand(count, *self.shape, generator=generator)


@dataclass
class ClassGaussianStarts:
    """Draws from a Gaussian fitted to each class (mean, leading covariance directions): JEM++ (Yang & Ji 2021).

    images (N, C, H, W) in network units and labels (N,); rank: covariance directions kept; jitter: standard deviation
    of white noise added to every pixel, in network units.
    """

    images: Tensor
    labels: Tensor
    bounds: tuple[float, float]
    rank: int = 100
    jitter: float = 0.05
    means: Tensor = field(init=False)
    factors: Tensor = field(init=False)

    def __post_init__(self) -> None:
        flat, shape = self.images.flatten(1).double(), self.images.shape[1:]
        means, factors = [], []
        for label in self.labels.unique().tolist():
            members = flat[self.labels == label]
            mean = members.mean(0)
            values, vectors = torch.linalg.eigh((members - mean).T.cov(correction=0))
            keep = slice(len(values) - min(self.rank, len(values)), None)
            means.append(mean.float().view(shape))
            factors.append((vectors[:, keep] * values[keep].clamp_min(0).sqrt()).float())
        self.means, self.factors = torch.stack(means), torch.stack(factors)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """(count, C, H, W) starts in network units, classes equally likely."""
        label = torch.randint(len(self.means), (count,), generator=generator)
        weights = torch.randn(count, self.factors.shape[2], generator=generator)
        offset = torch.einsum("ndr,nr->nd", self.factors[label], weights).view(count, *self.means.shape[1:])
        noise = self.jitter * torch.randn(offset.shape, generator=generator)
        return (self.means[label] + offset + noise).clamp(*self.bounds)


@dataclass
class ReplayBuffer:
    """Samples of earlier iterations from which new chains go on (persistent contrastive divergence).

    size: samples kept. restart: share of chains that begin afresh from `starts`.
    """

    starts: UniformStarts | ClassGaussianStarts
    size: int
    restart: float
    generator: torch.Generator
    samples: Tensor = field(init=False)

    def __post_init__(self) -> None:
        blocks = torch.arange(self.size).split(500)
        self.samples = torch.cat([self.starts.sample(len(b), self.generator) for b in blocks])

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """Starting states (count, C, H, W) and the slots (count,) their samples go back to."""
        slots = torch.randint(self.size, (count,), generator=self.generator)
        states = self.samples[slots]
        fresh = torch.rand(count, generator=self.generator) < self.restart
        if bool(fresh.any()):
            states[fresh] = self.starts.sample(int(fresh.sum()), self.generator)
        return states, slots

    def put_back(self, slots: Tensor, samples: Tensor) -> None:
        """Store the chains' last states."""
        for slot, sample in zip(slots.tolist(), samples, strict=True):  # in order, for a slot may be drawn twice
            self.samples[slot] = sample
