"""Norms, distances, projections and epsilons. The 2-norm is the plain one of the difference, not RMS."""

from math import isfinite
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

NORMS = ("linf", "l2", "l0")
_ALIASES = {"linf": "linf", "inf": "linf", "l2": "l2", "2": "l2", "2.0": "l2", "l0": "l0", "0": "l0"}


def parse_norm(norm: Any, allowed: tuple[str, ...] = ("linf", "l2")) -> str:
    """Canonical norm name from linf/Linf/inf, l2/L2/2 or l0. Raises ValueError for others."""
    name = _ALIASES.get(str(norm).strip().lower())
    if name not in allowed:
        raise ValueError(f"expected a norm out of {', '.join(allowed)}, got {norm!r}: pass one of them")
    return name


def parse_epsilon(epsilon: Any) -> float:
    """A perturbation size in [0, 1] image units from a number or text such as "8/255".

    Raises ValueError for text that is no number, NaN, infinity, division by zero and negative values.
    """
    try:
        over, slash, under = str(epsilon).partition("/")
        value, divisor = float(over), float(under) if slash else 1.0
        value = value / divisor if isfinite(divisor) else float("nan")
    except (ValueError, ZeroDivisionError):
        value = float("nan")
    if not isfinite(value) or value < 0:
        raise ValueError(f"expected an epsilon such as 0.03 or 8/255, got {epsilon!r}: pass a finite number from 0 up")
    return value


def spread(values: Tensor, like: Tensor) -> Tensor:
    """(N,) -> (N, 1, 1, 1), to scale images by."""
    return values.view(-1, *[1] * (like.dim() - 1))


def distance(a: Tensor, b: Tensor, norm: str) -> Tensor:
    """Distance of images (N, ...) in float64: (N,). l0 counts pixels, all channels of one place being one pixel."""
    difference = (a.double() - b.double()).abs()
    if not difference.numel():
        return difference.new_zeros(len(a))
    if norm == "l0":
        places = difference.amax(1) if difference.dim() > 2 else difference
        return (places > 0).view(len(a), -1).sum(1).double()
    return difference.flatten(1).amax(1) if norm == "linf" else difference.flatten(1).norm(dim=1)


def project(x: Tensor, center: Tensor, epsilon: float | Tensor, norm: str, bounds: tuple[float, float]) -> Tensor:
    """Nearest point (linf) or a point (l2) within epsilon of center (N, ...) and within bounds, in the dtype of x.

    epsilon: one size, or one an image (N,).
    In float64 and rounded towards center, for rounding alone can leave a small ball or one of many dimensions.
    """
    exact = center.double()
    delta = x.double() - exact
    sizes = torch.as_tensor(epsilon, dtype=torch.float64, device=x.device).expand(len(x))
    if norm == "linf":
        delta = delta.clamp(-spread(sizes, delta), spread(sizes, delta))
    elif delta.numel():
        length = delta.flatten(1).norm(dim=1).clamp_min(torch.finfo(torch.float64).tiny)
        delta = delta * spread((sizes / length).clamp(max=1.0), delta)
    return rounded((exact + delta).clamp(*bounds), center, x.dtype)


def rounded(x: Tensor, center: Tensor, dtype: torch.dtype) -> Tensor:
    """x in another dtype, rounded towards center (which that dtype can hold): never farther away than x was."""
    near, middle = x.to(dtype), center.to(dtype)
    away = torch.where(x >= center, near > x, near < x)
    return torch.where(away, torch.nextafter(near, middle), near)


def steepest(gradient: Tensor, norm: str) -> Tensor:
    """The unit-norm direction of steepest ascent; zero where the gradient is zero or not finite."""
    gradient = torch.nan_to_num(gradient, 0.0, 0.0, 0.0)
    if norm == "linf":
        return gradient.sign()
    # Scaling by the largest component first keeps tiny gradients from underflowing when squared.
    largest = gradient.flatten(1).abs().amax(1) if gradient.numel() else gradient.new_zeros(len(gradient))
    scaled = gradient / spread(torch.where(largest > 0, largest, 1.0), gradient)
    length = scaled.flatten(1).norm(dim=1)
    return scaled / spread(torch.where(length > 0, length, 1.0), scaled)


def random_offset(shape: tuple[int, ...], epsilon: float, norm: str, rng: np.random.Generator) -> Tensor:
    """One offset, uniform in the ball of radius epsilon: float64 of the shape given."""
    if norm == "linf":
        return torch.from_numpy(rng.uniform(-epsilon, epsilon, shape))
    direction = rng.standard_normal(shape)
    radius = epsilon * rng.uniform() ** (1 / direction.size)
    return torch.from_numpy(direction * (radius / max(np.linalg.norm(direction), 1e-300)))


def whole(name: str, value: Any, least: int) -> int:
    """An int of at least `least` from anything that counts as a whole number. ValueError names the setting."""
    try:
        number = index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise ValueError(f"expected {name} to be a whole number from {least} up, got {value!r}")
    return number
