"""jem-robust: how robust a joint energy-based model (JEM) is, measured honestly. Names load torch when first used."""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "JEMClassifier": "jem_robust.classifier",
    "Refinement": "jem_robust.langevin",
    "load_images": "jem_robust.images",
    "load_model": "jem_robust.models",
    "evaluate": "jem_robust.evaluation.robustness",
    "RobustnessCurve": "jem_robust.evaluation.curve",
    "plot_curves": "jem_robust.reporting.plots",
}
__all__ = ["JEMClassifier", "Refinement", "RobustnessCurve", "evaluate", "load_images", "load_model", "plot_curves"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module jem_robust has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)
