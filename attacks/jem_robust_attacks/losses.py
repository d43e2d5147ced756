"""What gradient attacks climb: functions of logits (N, K) and labels (N,) -> (N,), larger meaning closer to wrong."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """max_{j != y} z_j - z_y: positive exactly where the label does not win."""
    own = logits.gather(1, labels.unsqueeze(1)).squeeze(1)
    others = logits.scatter(1, labels.unsqueeze(1), -torch.inf)
    return others.amax(1) - own


def towards(classes: Tensor) -> Loss:
    """The targeted margin z_t - z_y for target classes t (N,)."""

    def targeted(logits: Tensor, labels: Tensor) -> Tensor:
        return (logits.gather(1, classes.unsqueeze(1)) - logits.gather(1, labels.unsqueeze(1))).squeeze(1)

    return targeted


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-log softmax(z)[y]."""
    return F.cross_entropy(logits, labels, reduction="none")


def dlr(logits: Tensor, labels: Tensor) -> Tensor:
    """Difference of logits ratio (Croce & Hein 2020, equation 6): margin / (z_1st - z_3rd). Needs three classes."""
    if logits.shape[1] < 3:
        raise ValueError(f"expected at least 3 classes for the dlr loss, got {logits.shape[1]}: use the margin loss")
    top = logits.topk(3, 1).values
    return margin(logits, labels) / (top[:, 0] - top[:, 2] + 1e-12)


LOSSES: dict[str, Loss] = {"ce": cross_entropy, "margin": margin, "dlr": dlr}


def wrong(logits: Tensor, labels: Tensor) -> Tensor:
    """(N,) bool: the label is not predicted, or a logit is not finite."""
    return (logits.argmax(1) != labels) | ~torch.isfinite(logits).all(1)


def ascent_weights(logits: Tensor, labels: Tensor, loss: Loss, groups: int) -> tuple[Tensor, Tensor]:
    """d loss / d logits with every image's weights scaled to a largest entry of 1, and the loss: (G*n, K), (G*n,).

    Rows are `groups` draws of the same n images, draw by draw; all draws of an image share one scale, which leaves the
    direction of its gradient as it is. In float64, since a float32 softmax saturates and would end the attack there;
    where even that gives zero the margin takes over. No loss changes when all logits rise together, so the label's
    weight is minus the sum of the others: softmax(z)[y] - 1 would be rounded to 0 long before they are.
    """
    with torch.inference_mode(False), torch.enable_grad():
        z = logits.detach().double().requires_grad_()
        values = loss(z, labels)
        (weights,) = torch.autograd.grad(values.sum(), z)
        own = labels.unsqueeze(1)
        weights = weights.scatter(1, own, 0.0)
        weights = weights.scatter(1, own, -weights.sum(1, keepdim=True))
        size = weights.abs().view(groups, -1, z.shape[1]).amax((0, 2)).repeat(groups).unsqueeze(1)
        scaled, gone = weights / size, size <= 0
        if bool(gone.any()):
            scaled = torch.where(gone, torch.autograd.grad(margin(z, labels).sum(), z)[0], scaled)
    return scaled.to(logits.dtype), values.detach()
