"""torchattacks: a JEM as a module for its attacks. Written against torchattacks 3.5.1.

torchattacks pins requests~=2.25.1 and asks for torchvision though its code imports neither:
`pip install --no-deps torchattacks==3.5.1` is enough.
"""

from torch import nn

from jem_robust.adapters.guard import Guarded, check_model, missing

try:
    import torchattacks  # noqa: F401  # so that its absence shows here rather than in the middle of a pipeline
except ImportError as error:
    raise missing("torchattacks", "pip install jem-robust[torchattacks]", error) from error


def to_torchattacks(model: nn.Module, eot: int = 1) -> nn.Module:
    """The model for torchattacks' attacks: `torchattacks.PGD(to_torchattacks(model), ...)`.

    model: a JEMClassifier, held itself. eot: draws whose logits are averaged where a gradient is asked for. Every call
    draws fresh noise from the model's plain stream; flags and gradients stay untouched, though torchattacks 3.5.1
    calls train() afterwards. Images out of [0, 1], which torchattacks would clip, raise ValueError.
    Raises TypeError for another model, ValueError for eot.
    """
    check_model(model, eot)
    return Guarded(model, eot)
