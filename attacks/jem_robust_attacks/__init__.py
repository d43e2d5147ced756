"""Attacks on any callable images -> logits, random ones included; they know nothing of how the model works."""

from jem_robust_attacks.boundary import BoundaryAttack
from jem_robust_attacks.descent import Descent
from jem_robust_attacks.pgd import PGD
from jem_robust_attacks.pointwise import PointwiseAttack
from jem_robust_attacks.rays import RayS
from jem_robust_attacks.result import AttackResult
from jem_robust_attacks.square import Square

__all__ = ["PGD", "AttackResult", "BoundaryAttack", "Descent", "PointwiseAttack", "RayS", "Square"]
