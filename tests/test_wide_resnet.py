"""The 2019 network: its names and shapes, its function, and the settings read back from its shapes."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from jem_robust.networks import build_network
from jem_robust.networks.wide_resnet import WideResNet, infer_wide_resnet

SMALL = {"channels": 3, "num_classes": 10, "depth": 10, "width": 2}


def described(channels: int, num_classes: int, depth: int, width: int) -> dict[str, tuple[int, ...]]:
    """Every name and shape that the description of the 2019 files calls for, written down without the network."""
    shapes: dict[str, tuple[int, ...]] = {}

    def put(name: str, *shape: int) -> None:
        shapes.update({f"{name}.weight": shape, f"{name}.bias": shape[:1]})

    put("f.conv1", 16, channels, 3, 3)
    before = 16
    for layer, after in ((1, 16 * width), (2, 32 * width), (3, 64 * width)):
        for i in range((depth - 4) // 6):
            put(f"f.layer{layer}.{i}.conv1", after, before, 3, 3)
            put(f"f.layer{layer}.{i}.conv2", after, after, 3, 3)
            if i == 0 and (layer > 1 or before != after):
                put(f"f.layer{layer}.{i}.shortcut.0", after, before, 1, 1)
            before = after
    put("f.linear", num_classes, 64 * width)
    put("energy_output", 1, 64 * width)
    put("class_output", num_classes, 64 * width)
    return shapes


def functional(weights: dict[str, Tensor], x: Tensor, blocks: int) -> Tensor:
    """The network once more, from its weights alone."""

    def conv(name: str, x: Tensor, stride: int = 1) -> Tensor:
        kernel = weights[f"{name}.weight"]
        return F.conv2d(x, kernel, weights[f"{name}.bias"], stride=stride, padding=kernel.shape[-1] // 2)

    def act(x: Tensor) -> Tensor:
        return torch.where(x > 0, x, 0.2 * x)

    x = conv("f.conv1", x)
    for layer in (1, 2, 3):
        for i in range(blocks):
            name, stride = f"f.layer{layer}.{i}", 2 if layer > 1 and i == 0 else 1
            short = conv(f"{name}.shortcut.0", x, stride) if f"{name}.shortcut.0.weight" in weights else x
            x = conv(f"{name}.conv2", act(conv(f"{name}.conv1", act(x))), stride) + short
    return act(x).mean((2, 3)) @ weights["class_output.weight"].T + weights["class_output.bias"]


@pytest.mark.parametrize(
    "settings",
    [
        {"channels": 3, "num_classes": 10, "depth": 28, "width": 10},
        SMALL,
        {"channels": 1, "num_classes": 7, "depth": 16, "width": 1},
    ],
)
def test_names_shapes_and_inference(settings: dict[str, int]) -> None:
    with torch.device("meta"):
        weights = WideResNet(**settings).state_dict()
    assert {name: tuple(value.shape) for name, value in weights.items()} == described(**settings)
    assert infer_wide_resnet(weights) == settings


def test_wrn_28_10_is_the_default_and_has_its_size() -> None:
    with torch.device("meta"):
        network = WideResNet()
    assert len(network.state_dict()) == 62
    assert round(sum(p.numel() for p in network.parameters()) / 1e6, 1) == 36.5  # arXiv 1605.07146, table 4
    assert infer_wide_resnet(network.state_dict()) == {"channels": 3, "num_classes": 10, "depth": 28, "width": 10}


def test_names_of_wrn_10_2() -> None:
    layers = ["f.conv1", "f.linear", "energy_output", "class_output"]
    layers += [f"f.layer{i}.0.{part}" for i in (1, 2, 3) for part in ("conv1", "conv2", "shortcut.0")]
    expected = {f"{name}.{kind}" for name in layers for kind in ("weight", "bias")}
    assert set(WideResNet(**SMALL).state_dict()) == expected


@pytest.mark.parametrize(
    "settings",
    [
        SMALL,
        {"channels": 1, "num_classes": 4, "depth": 10, "width": 1},
        {"channels": 2, "num_classes": 3, "depth": 16, "width": 1},
    ],
)
def test_forward_equals_functional(settings: dict[str, int]) -> None:
    network = WideResNet(**settings).double().eval()
    x = torch.rand(2, settings["channels"], 32, 32, generator=torch.Generator().manual_seed(0)).double() * 2 - 1
    with torch.no_grad():
        logits = network(x)
        expected = functional(network.state_dict(), x, (settings["depth"] - 4) // 6)
    assert logits.shape == (2, settings["num_classes"])
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-12)


def test_strides_sit_in_the_second_convolution_of_layers_2_and_3() -> None:
    network = WideResNet(depth=16, width=1)
    strides = {name: m.stride for name, m in network.named_modules() if isinstance(m, torch.nn.Conv2d)}
    halving = {name for name, stride in strides.items() if stride == (2, 2)}
    assert halving == {f"f.layer{i}.0.{part}" for i in (2, 3) for part in ("conv2", "shortcut.0")}
    assert all(stride == (1, 1) for name, stride in strides.items() if name not in halving)


def test_no_images_and_unused_heads() -> None:
    network = WideResNet(**SMALL)
    assert network(torch.zeros(0, 3, 32, 32)).shape == (0, 10)
    network(torch.zeros(1, 3, 32, 32)).sum().backward()
    unused = {name for name, p in network.named_parameters() if p.grad is None}
    assert unused == {f"{name}.{kind}" for name in ("f.linear", "energy_output") for kind in ("weight", "bias")}


@pytest.mark.parametrize("shape", [(2, 3, 28, 28), (2, 1, 32, 32), (3, 32, 32), (2, 3, 36, 36)])
def test_other_images_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected images \(N, 3, 32, 32\), got"):
        WideResNet(**SMALL)(torch.zeros(shape))


@pytest.mark.parametrize(
    "bad",
    [
        {"depth": 27},
        {"depth": 4},
        {"depth": -2},
        {"depth": 28.0},
        {"width": 0},
        {"channels": 0},
        {"num_classes": -1},
        {"width": "10"},
    ],
)
def test_bad_settings(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"expected {next(iter(bad))}"):
        build_network("wide-resnet", **bad)


def test_registered() -> None:
    assert isinstance(build_network("wide-resnet", **SMALL), WideResNet)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("f.conv1.weight", (32, 3, 3, 3), "name its architecture"),
        ("f.conv1.weight", (16,), "4 dimensions"),
        ("class_output.weight", (10, 100), "name its architecture"),
        ("class_output.weight", (10, 0), "name its architecture"),
        ("class_output.weight", None, "got none"),
        ("f.layer2.0.conv1.weight", None, "equally many blocks"),
        ("f.layer3.1.conv1.weight", (128, 128, 3, 3), "equally many blocks"),
    ],
)
def test_inference_refuses(name: str, shape: tuple[int, ...] | None, message: str) -> None:
    weights = WideResNet(**SMALL).state_dict()
    if shape is None:
        del weights[name]
    else:
        weights[name] = torch.zeros(shape)
    with pytest.raises(ValueError, match=message):
        infer_wide_resnet(weights)
