"""torchattacks: a JEM as a module for its attacks. Written against torchattacks 3.5.1.

torchattacks pins requests~=2.25.1 and asks for torchvision though its code imports neither:
`pip install --no-deps torchattacks==3.5.1` is enough.
"""

from typing import Self

from torch import nn

from jem_robust.adapters.guard import Guarded, check_model, missing
from jem_robust.adapters.isolation import argument_of
from jem_robust.images import check_images

try:
    from torchattacks.attack import Attack
except ImportError as error:
    raise missing("torchattacks", "pip install jem-robust[torchattacks]", error) from error


class _TorchattacksModule(Guarded):
    def train(self, mode: bool = True) -> Self:
        """Check the images of the attack that calls this first of all; the mode stays as it is.

        torchattacks 3.5.1: Attack.__call__ sets the model's mode, and then many attacks clip the images to [0, 1].
        """
        images = argument_of(Attack.__call__, "inputs")
        if images is not None:
            check_images(images)
        return self


def to_torchattacks(model: nn.Module, eot: int = 1) -> nn.Module:
    """The model for torchattacks' attacks: `torchattacks.PGD(to_torchattacks(model), ...)`.

    model: a JEMClassifier, held itself. eot: draws whose logits, not whose gradients, are averaged where a gradient is
    asked for, since the attack applies its loss to what it is handed; torchattacks.EOTPGD averages gradients. Every
    call draws fresh noise from the model's plain stream; flags and gradients stay untouched, though torchattacks 3.5.1
    calls train() afterwards. Images out of [0, 1], which torchattacks would clip, raise ValueError.
    Raises TypeError for another model, ValueError for eot.
    """
    check_model(model, eot)
    return _TorchattacksModule(model, eot)
