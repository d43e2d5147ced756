"""Reading checkpoints that jem-robust did not write: the 2019 JEM files and other state dicts."""

import inspect
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from jem_robust.checkpoints import build_from, load_checkpoint, load_weights, read_card
from jem_robust.networks import ARCHITECTURES
from jem_robust.networks.wide_resnet import IMAGE_SIZE, infer_wide_resnet

PICKLED = (".pt", ".pth", ".ckpt")
WIDE_RESNET = "wide-resnet"
INPUT_RANGE = (-1.0, 1.0)  # that of the 2019 code, and the default where a file says nothing


def load_foreign(
    path: str | Path, architecture: str | None = None, unsafe: bool = False, **settings: Any
) -> tuple[nn.Module, dict[str, Any]]:
    """Network in eval mode and a card for a checkpoint file of somebody else's.

    path: .pt, .pth or .ckpt holding {"model_state_dict": weights, ...} or the bare weights, or a .safetensors; names
    may carry DataParallel's `module.`. The layout of the 2019 JEM code (github.com/wgrathwohl/JEM) needs nothing else:
    its settings follow from the shapes. For other weights, architecture and settings say which registered network they
    belong to. unsafe: unpickle whatever the file holds, which RUNS ANY CODE in it; a pickled module is then accepted
    too, for its weights. A .safetensors with a jem-robust card is loaded as such.

    The card has architecture, input_range (-1, 1), num_classes and input_shape (C, H, W) where they are known, and no
    refinement. The global random state is left as it was.
    Raises ValueError for every file that cannot be loaded and for settings that do not fit it.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"expected a checkpoint file, got {path}, which is no file: check the path")
    if path.suffix.lower() == ".safetensors" and "architecture" in read_card(path):
        if architecture is not None or settings:
            raise ValueError(f"expected no architecture for {path}, whose card names one: leave it out")
        return load_checkpoint(path)
    weights = _strip_prefix(_read_weights(path, unsafe))
    if architecture in (None, WIDE_RESNET) and {"f.conv1.weight", "class_output.weight"} <= set(weights):
        architecture, settings = WIDE_RESNET, _inferred(weights, settings, path)
    if architecture is None:
        raise ValueError(
            f"expected the weights of the 2019 JEM code, got {path} with {_some(weights)}: "
            f"name the architecture, one of {sorted(ARCHITECTURES)}, and its settings"
        )
    with torch.random.fork_rng(devices=[]):  # initial weights are drawn, then overwritten
        network = build_from({**settings, "name": architecture})
    if architecture == WIDE_RESNET:
        weights = _fit_unused_head(network, weights)
    load_weights(network, weights, str(path))
    return network.eval(), _card(architecture, settings)


def _read_weights(path: Path, unsafe: bool) -> dict[str, Tensor]:
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if suffix in PICKLED:
        return _find_weights(_read_pickled(path, unsafe), path)
    raise ValueError(f"expected a file ending in {', '.join((*PICKLED, '.safetensors'))}, got {path}: rename it")


def _read_pickled(path: Path, unsafe: bool) -> object:
    try:
        with warnings.catch_warnings():  # torch's remarks on pickle protocols and TorchScript help nobody here
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=not unsafe)
    except Exception as error:  # a damaged or hostile pickle can raise anything, KeyError and IndexError included
        reason = _reason(error)
        if not unsafe and isinstance(error, pickle.UnpicklingError) and ("asks for" in reason or _looks_pickled(path)):
            raise ValueError(
                f"expected a file of tensors only, got {path} with pickled objects ({reason}), which are not loaded "
                "without --unsafe-load (unsafe=True): that executes code in the file, so only for files you trust"
            ) from error
        raise ValueError(
            f"expected a whole checkpoint written by torch.save, got {path}, which is truncated or something else "
            f"({reason}): copy, download or save it again"
        ) from error


def _reason(error: Exception) -> str:
    """What torch's long messages are about: the object a pickle asks for, else the first sentence."""
    text = str(error).rpartition("WeightsUnpickler error: ")[2].strip()
    asked = re.search(r"GLOBAL ([\w.]+\w)", text)
    sentence = f"it asks for {asked[1]}" if asked else re.split(r"\.\s|\n", text)[0]
    return f"{type(error).__name__}: {sentence}" if text else type(error).__name__


def _looks_pickled(path: Path) -> bool:
    """Whether a file that torch refused to unpickle was a pickle at all (in a zip or bare), rather than junk."""
    with path.open("rb") as file:
        return file.read(1) == b"\x80" or zipfile.is_zipfile(path)


def _find_weights(content: object, path: Path) -> dict[str, Tensor]:
    if isinstance(content, nn.Module):  # only ever reached with unsafe
        content = content.state_dict()
    if isinstance(content, Mapping) and "model_state_dict" in content:
        content = content["model_state_dict"]
    if not isinstance(content, Mapping):
        got = f"a {type(content).__name__}"
    elif not content:
        got = "an empty one"
    else:
        strange = [name for name, value in content.items() if not (isinstance(name, str) and isinstance(value, Tensor))]
        if not strange:
            return dict(content)
        got = f"entries that are no named tensors: {_some(strange)}"
    raise ValueError(
        f"expected a state dict, alone or under 'model_state_dict', got {got} in {path}: "
        "save network.state_dict() with torch.save"
    )


def _strip_prefix(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    prefix = "module."
    if weights and all(name.startswith(prefix) for name in weights):
        return {name.removeprefix(prefix): value for name, value in weights.items()}
    return weights


def _inferred(weights: Mapping[str, Tensor], settings: Mapping[str, Any], path: Path) -> dict[str, Any]:
    try:
        inferred = infer_wide_resnet(weights)
    except ValueError as error:
        raise ValueError(f"{error} (in {path})") from error
    wrong = {name: value for name, value in settings.items() if inferred.get(name) != value}
    if wrong:
        raise ValueError(f"expected settings that fit the shapes in {path}, {inferred}, got {wrong}: leave them out")
    return dict(inferred)


def _fit_unused_head(network: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Zeros for an f.linear of another size: the 2019 code gives it 10 outputs whatever the number of classes."""
    own = network.state_dict()
    names = [n for n in ("f.linear.weight", "f.linear.bias") if n in weights and weights[n].shape != own[n].shape]
    return weights | {name: torch.zeros_like(own[name]) for name in names}


def _card(architecture: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(ARCHITECTURES[architecture]).bind(**settings)
    bound.apply_defaults()  # so that the card still means this network should a default change
    card: dict[str, Any] = {"architecture": {"name": architecture, **bound.arguments}, "input_range": INPUT_RANGE}
    if "num_classes" in bound.arguments:
        card["num_classes"] = bound.arguments["num_classes"]
    if architecture == WIDE_RESNET:
        card["input_shape"] = (bound.arguments["channels"], IMAGE_SIZE, IMAGE_SIZE)
    return card


def _some(names: Iterable[object]) -> str:
    listed = [repr(name) for name in names]
    return ", ".join(listed[:4]) + (f", ... ({len(listed)} in all)" if len(listed) > 4 else "") or "no weights"
