"""The attacks of the contract: as a pipeline writes them (`own`), and as our evaluation is asked for them (`ours`)."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.adapters.world import EPS


@dataclass(frozen=True)
class Row:
    """limited: whether the toolkit itself keeps to eps. flaw: (version and cause) of a known bug, by what it breaks."""

    toolkit: str
    name: str
    norm: str
    ours: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    limited: bool = True
    flaws: dict[str, str] = field(default_factory=dict)

    @property
    def eps(self) -> float:
        return EPS[self.norm]

    def __str__(self) -> str:
        return f"{self.toolkit}:{self.name}-{self.norm}"


INF, TWO = {"norm": np.inf, "eps": EPS["linf"]}, {"norm": 2, "eps": EPS["l2"]}
QUIET = {"verbose": False}
UNSEEDED = "ART 1.20.1: starts from np.random.RandomState(), which the operating system seeds"
NO_START = "Foolbox 3.3.4: one image whose start does not fool a second draw fails the whole batch"

ART = [
    Row("art", "FastGradientMethod", "linf", {}, INF),
    Row("art", "ProjectedGradientDescent", "linf", {"max_iter": 3}, INF | QUIET | {"eps_step": 0.05}),
    Row("art", "ProjectedGradientDescentNumpy", "l2", {"max_iter": 3}, TWO | QUIET | {"eps_step": 0.2}),
    Row(
        "art", "ProjectedGradientDescentPyTorch", "linf", {"max_iter": 3, "num_random_init": 2},
        INF | QUIET | {"eps_step": 0.05},
    ),
    Row(
        "art", "AutoProjectedGradientDescent", "linf", {"max_iter": 4, "nb_random_init": 1},
        INF | QUIET | {"eps_step": 0.2},
    ),
    Row("art", "CarliniL2Method", "l2", {"max_iter": 2, "binary_search_steps": 1}, QUIET, limited=False),
    Row("art", "DeepFool", "l2", {"max_iter": 3}, QUIET, limited=False),
    Row(
        "art", "BoundaryAttack", "l2", {"max_iter": 2, "num_trial": 2, "sample_size": 4},
        QUIET | {"targeted": False}, limited=False, flaws={"seed": UNSEEDED},
    ),
    Row(
        "art", "HopSkipJump", "l2", {"max_iter": 1, "max_eval": 4, "init_eval": 2, "init_size": 5}, QUIET,
        limited=False, flaws={"seed": UNSEEDED},
    ),
    Row("art", "SquareAttack", "linf", {"max_iter": 5}, INF | QUIET),
    Row("art", "PixelAttack", "l0", {"max_iter": 1, "th": 1}, QUIET),
]  # fmt: skip

FOOLBOX = [
    Row("foolbox", "LinfPGD", "linf", {"steps": 3}),
    Row("foolbox", "L2PGD", "l2", {"steps": 3}),
    Row("foolbox", "LinfFastGradientAttack", "linf"),
    Row("foolbox", "LInfFMNAttack", "linf", {"steps": 4}),
    Row("foolbox", "L2DeepFoolAttack", "l2", {"steps": 3}),
    Row("foolbox", "L2CarliniWagnerAttack", "l2", {"steps": 3, "binary_search_steps": 2}),
    Row("foolbox", "DDNAttack", "l2", {"steps": 4}),
    Row("foolbox", "BoundaryAttack", "l2", {"steps": 2}, flaws={"run": NO_START}),
    Row("foolbox", "SaltAndPepperNoiseAttack", "l0", {"steps": 5}, limited=False),
]

TORCHATTACKS = [
    Row("torchattacks", "FGSM", "linf", {}, {"eps": EPS["linf"]}),
    Row("torchattacks", "PGD", "linf", {"steps": 3}, {"eps": EPS["linf"]}),
    Row("torchattacks", "PGDL2", "l2", {"steps": 3}, {"eps": EPS["l2"]}),
    Row("torchattacks", "EOTPGD", "linf", {"steps": 3}, {"eps": EPS["linf"]}),
    Row("torchattacks", "APGD", "l2", {"steps": 4}, {"eps": EPS["l2"], "norm": "L2"}),
    Row("torchattacks", "Square", "linf", {"n_queries": 5}, {"eps": EPS["linf"]}),
    Row("torchattacks", "CW", "l2", {"steps": 3}, limited=False),
    Row("torchattacks", "DeepFool", "l2", {"steps": 3}, limited=False),
]
TABLE = ART + FOOLBOX + TORCHATTACKS
