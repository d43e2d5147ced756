"""Checkpoints: weights as safetensors with a card (JSON) in the metadata; nothing is ever unpickled unasked."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from jem_robust.files import replacing
from jem_robust.networks import build_network

CARD_KEY = "jem_robust_card"
CARD_VERSION = 1


def save_checkpoint(path: str | Path, network: nn.Module, card: Mapping[str, Any]) -> None:
    """Write the network's weights and its card into one .safetensors file.

    card: JSON-able; must hold `architecture` ({"name": ..., settings}) and should hold input_range, input_shape,
    num_classes, refinement, training and metrics.
    """
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in network.state_dict().items()}
    with replacing(path) as temporary:
        save_file(tensors, temporary, {CARD_KEY: json.dumps({"card_version": CARD_VERSION, **card})})


def read_card(path: str | Path) -> dict[str, Any]:
    """The card of a checkpoint, without reading its weights; {} where the file has none."""
    try:
        with safe_open(path, "pt") as file:
            card = json.loads((file.metadata() or {}).get(CARD_KEY, "{}"))
    except (SafetensorError, ValueError, OSError) as error:
        raise ValueError(f"expected a whole .safetensors file, got {path} ({error}): copy or save it again") from error
    if not isinstance(card, dict):
        raise ValueError(f"expected a card of named entries, got a {type(card).__name__} in {path}: save it again")
    return card


def load_checkpoint(path: str | Path) -> tuple[nn.Module, dict[str, Any]]:
    """Network in eval mode and card of a .safetensors checkpoint written by `save_checkpoint`.

    Raises ValueError for a truncated or foreign file and for weights that do not fit the card's architecture.
    """
    card = read_card(path)
    if "architecture" not in card:
        raise ValueError(f"expected a checkpoint with a jem-robust card, got {path} without: name its architecture")
    try:
        with torch.random.fork_rng(devices=[]):  # initial weights are drawn, then overwritten
            network = build_from(card["architecture"])
    except ValueError as error:
        raise ValueError(f"{error} (in {path})") from error
    with safe_open(path, "pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    load_weights(network, weights, str(path))
    return network.eval(), card


def build_from(architecture: Any) -> nn.Module:
    """A fresh network from the `architecture` of a card, {"name": ..., settings}. ValueError where that makes none."""
    if not isinstance(architecture, Mapping) or not isinstance(architecture.get("name"), str):
        raise ValueError(f"expected an architecture with a name and settings, got {architecture!r}: correct the card")
    settings = {key: value for key, value in architecture.items() if key != "name"}
    try:
        return build_network(architecture["name"], **settings)
    except (TypeError, RuntimeError, OverflowError, ZeroDivisionError) as error:
        name = architecture["name"]
        raise ValueError(f"expected settings that make a {name}, got {settings} ({error}): correct them") from error


def load_weights(network: nn.Module, weights: Mapping[str, torch.Tensor], origin: str) -> None:
    """Fill the network with weights; ValueError that names what is missing, unexpected or of another shape."""
    try:
        network.load_state_dict(dict(weights))
    except RuntimeError as error:
        raise ValueError(
            f"expected weights that fit the network, got {origin}, which fits another architecture or other settings: "
            f"{error}"
        ) from error


def file_hash(path: str | Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
