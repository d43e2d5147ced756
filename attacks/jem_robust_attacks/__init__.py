"""Attacks on any callable images -> logits, random ones included; they know nothing of how the model works."""

from jem_robust_attacks.pgd import PGD
from jem_robust_attacks.result import AttackResult

__all__ = ["PGD", "AttackResult"]
