"""Models by name, file or factory, ready to be measured."""

import importlib
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from jem_robust.checkpoints import file_hash, load_checkpoint, read_card
from jem_robust.classifier import MEMORY, JEMClassifier
from jem_robust.images import ASSETS
from jem_robust.langevin import Refinement
from jem_robust.legacy import load_foreign

EMBEDDED = {
    "jem-fashion-mnist": ASSETS / "jem-fashion-mnist.safetensors",
    "baseline-fashion-mnist": ASSETS / "baseline-fashion-mnist.safetensors",
}


def load_model(
    source: str | Path, steps: int | None = None, *, gradient: str = "exact", seed: int = 0,
    device: str | torch.device = "cpu", memory: int = MEMORY, architecture: str | None = None, unsafe: bool = False,
    **settings: Any,
) -> JEMClassifier:  # fmt: skip
    """A JEM-k classifier.

    source: an embedded name, a checkpoint file, or "package.module:factory" (a callable that returns a network or a
    JEMClassifier). steps: k; by default the card's. The rest of the refinement comes from the card; without one it is
    Refinement(steps=k) with input range (-1, 1). architecture: for bare state dicts. settings: keywords of Refinement,
    and for bare state dicts the architecture's. unsafe: unpickle.
    Raises ValueError for unknown names and files that cannot be used, ImportError for a factory's module.
    """
    known = {f.name for f in fields(Refinement)}
    changes = {k: settings.pop(k) for k in list(settings) if k in known}
    with torch.inference_mode(False):
        model = _load(str(source), architecture, unsafe, memory, settings)
    if steps is not None:
        changes["steps"] = steps
    if changes:
        model = model.with_refinement(**changes)
    model = model.with_gradient(gradient)
    try:
        return model.to(torch.device(device)).reseed(seed)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"expected a device this machine has, got {device!r} ({error}): try cpu") from error


def _load(source: str, architecture: str | None, unsafe: bool, memory: int, settings: dict[str, Any]) -> JEMClassifier:
    path = EMBEDDED.get(source, Path(source))
    if path.is_file():
        if path.suffix == ".safetensors" and architecture is None and read_card(path):
            _refuse(settings, source)
            network, card = load_checkpoint(path)
        else:
            network, card = load_foreign(path, architecture, unsafe, **settings)
        return _carded(network, {**card, "file": str(path), "sha256": file_hash(path)}, memory)
    if ":" in source and not path.exists():
        _refuse(settings, source)
        return _from_factory(source, memory)
    raise ValueError(f"expected {', '.join(EMBEDDED)}, a checkpoint file or package.module:factory, got {source!r}")


def _refuse(settings: dict[str, Any], source: str) -> None:
    if settings:
        raise TypeError(f"expected keywords of Refinement for {source}, got {', '.join(sorted(settings))}: remove them")


def _carded(network: nn.Module, card: dict[str, Any], memory: int) -> JEMClassifier:
    known = {f.name for f in fields(Refinement)}
    refinement = Refinement(**{k: v for k, v in card.get("refinement", {}).items() if k in known})
    network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return JEMClassifier(
        network, refinement, tuple(card.get("input_range", (-1.0, 1.0))), input_shape=card.get("input_shape"),
        num_classes=card.get("num_classes"), memory=memory, card=card,
    )  # fmt: skip


def _from_factory(source: str, memory: int) -> JEMClassifier:
    module, _, name = source.partition(":")
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"expected an importable package.module:factory, got {source!r} ({error})") from error
    try:
        made = factory()
    except Exception as error:
        raise ValueError(f"expected {source} to return a network, it raised {type(error).__name__}: {error}") from error
    if isinstance(made, JEMClassifier):
        return made
    if not isinstance(made, nn.Module):
        raise TypeError(f"expected {source} to return a network or JEMClassifier, got {type(made).__name__}")
    return JEMClassifier(made, Refinement(), memory=memory, card={"name": source})
