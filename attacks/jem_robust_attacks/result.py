"""What every attack returns."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttackResult:
    """adversarials (N, C, H, W): the original image where `success` (N,) is False. distances (N,): inf where failed.

    queries (N,) int64: draws spent. candidates (N, M, C, H, W) or None: what a verdict on fresh draws may choose from.
    nonfinite (N,) bool: the attack met a logit or gradient that is not finite.
    """

    adversarials: Tensor
    distances: Tensor
    success: Tensor
    queries: Tensor
    candidates: Tensor | None = None
    nonfinite: Tensor | None = None
