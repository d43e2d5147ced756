"""Architectures by name, so that a checkpoint's card can say which network its weights belong to."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from jem_robust.networks.small import SmallResNet
from jem_robust.networks.wide_resnet import WideResNet

ARCHITECTURES: dict[str, Callable[..., nn.Module]] = {"small-resnet": SmallResNet, "wide-resnet": WideResNet}


def build_network(architecture: str, **settings: Any) -> nn.Module:
    """A fresh network by architecture name and its settings.

    Raises ValueError for an unknown name or settings the architecture does not take.
    """
    if architecture not in ARCHITECTURES:
        raise ValueError(f"expected an architecture out of {sorted(ARCHITECTURES)}, got {architecture!r}")
    factory = ARCHITECTURES[architecture]
    accepted = list(inspect.signature(factory).parameters)
    unknown = sorted(set(settings) - set(accepted))
    if unknown:
        raise ValueError(f"expected settings of {architecture} out of {accepted}, got {unknown}: remove them")
    return factory(**settings)
