"""What can make a robustness number untrue, looked for in every evaluation; docs/warnings.md says what to do."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from jem_robust_attacks.losses import margin
from jem_robust_attacks.target import Target

PROBE_IMAGES = 8


@dataclass(frozen=True)
class Check:
    """One figure against its threshold; `warning` is the text to show when the figure exceeds it."""

    name: str
    value: float
    threshold: float
    warning: str

    @property
    def passed(self) -> bool:
        """Whether nothing needs to be said."""
        return self.value <= self.threshold

    def record(self) -> dict[str, Any]:
        """For result.json."""
        return {**asdict(self), "verdict": "ok" if self.passed else "warning"}


def probe(target: Target, images: Tensor, labels: Tensor, ids: Tensor, seed: int) -> list[Check]:
    """Checks that need the model on a few images: output shape (ValueError), probabilities, zero gradients."""
    x, y, ids = images[:PROBE_IMAGES], labels[:PROBE_IMAGES], ids[:PROBE_IMAGES]
    with torch.inference_mode(False), torch.enable_grad():
        leaf = x.clone().requires_grad_()
        logits = target.draw(leaf, ids, torch.zeros_like(ids), "plain", seed)
        if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != len(x):
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ValueError(f"expected logits of shape ({len(x)}, K) from the model, got {got}: check its output")
        if logits.shape[1] < 2:
            raise ValueError(
                f"expected logits of at least 2 classes, got shape {tuple(logits.shape)}: check the output"
            )
        if int(labels.max()) >= logits.shape[1]:
            raise ValueError(
                f"expected labels from 0 to {logits.shape[1] - 1}, got {int(labels.max())}: the model has "
                f"{logits.shape[1]} classes"
            )
        flat = 1.0
        if logits.requires_grad:
            (gradient,) = torch.autograd.grad(margin(logits, y).sum(), leaf)
            flat = float((gradient.flatten(1) == 0).all(1).double().mean())
    return [_probabilities(logits.detach()), _flat(flat), _global_noise(bool(getattr(target, "draws_globally", False)))]


def _global_noise(found: bool) -> Check:
    return Check(
        "global_noise", float(found), 0.0,
        "the network draws from torch's global random numbers: it is given seeded ones, and results may depend on the "
        "batch size; switch its own randomness off if you can",
    )  # fmt: skip


def _probabilities(logits: Tensor) -> Check:
    looks = bool((logits >= 0).all() and ((logits.sum(1) - 1).abs() < 1e-4).all())
    return Check(
        "probabilities", float(looks), 0.0,
        "the model seems to return probabilities instead of logits: gradients through a softmax vanish and hide "
        "adversarial images; return the logits",
    )  # fmt: skip


def _flat(share: float) -> Check:
    return Check(
        "zero_gradient", share, 0.1,
        f"the gradient is exactly zero on {share:.0%} of probed images, so gradient attacks see nothing: look for "
        "quantisation, saturation or detach, and add a black-box attack",
    )  # fmt: skip


def nonfinite(kind: str, count: int) -> Check:
    """kind: "logit" or "gradient"; count: images that met one."""
    return Check(
        f"nonfinite_{kind}", float(count), 0.0,
        f"{count} image(s) met a {kind} that is not finite and are not counted robust: mend the network's overflow",
    )  # fmt: skip
