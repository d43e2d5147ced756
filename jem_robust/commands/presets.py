"""Presets of `jem-robust attack`: how many images, iterations and draws; options given by hand win."""

from typing import Any

QUICK_EPSILONS = {"linf": (4 / 255, 8 / 255, 16 / 255), "l2": (0.5, 1.0, 2.0), "l0": (5.0, 10.0, 20.0)}
FINE_EPSILONS = {
    "linf": tuple(e / 255 for e in (2, 4, 8, 12, 16, 24)),
    "l2": (0.25, 0.5, 1.0, 1.5, 2.0, 3.0),
    "l0": (1.0, 2.0, 5.0, 10.0, 20.0, 40.0),
}
PRESETS: dict[str, dict[str, Any]] = {
    "quick": {
        "limit": 64, "iterations": 10, "restarts": 1, "eot": 1, "attack_chains": 1, "keep": 1,
        "select_draws": 4, "draws": 8, "epsilons": QUICK_EPSILONS, "max_queries": 500,
    },
    "standard": {
        "limit": 200, "iterations": 40, "restarts": 1, "eot": "auto", "attack_chains": 1, "keep": 3,
        "select_draws": 10, "draws": 20, "epsilons": FINE_EPSILONS, "max_queries": 2000,
    },
    "paper": {
        "limit": 300, "iterations": 40, "restarts": 20, "eot": "auto", "attack_chains": 5, "keep": 3,
        "select_draws": 10, "draws": 20, "epsilons": FINE_EPSILONS, "max_queries": 5000,
    },
}  # fmt: skip


def settings(preset: str, norm: str, given: dict[str, Any]) -> dict[str, Any]:
    """The preset's values for a norm, with what was given by hand in their place."""
    chosen = dict(PRESETS[preset])
    chosen["eps"] = chosen.pop("epsilons")[norm]
    return {**chosen, **{k: v for k, v in given.items() if v is not None}}
