"""Files of others: every accepted layout comes back as it was, everything else is a ValueError and runs nothing."""

import argparse
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from jem_robust.checkpoints import save_checkpoint
from jem_robust.legacy import load_foreign
from jem_robust.networks import build_network
from jem_robust.networks.small import SmallResNet
from jem_robust.networks.wide_resnet import WideResNet

WIDE = {"channels": 3, "num_classes": 5, "depth": 10, "width": 1}
SMALL: dict[str, Any] = {"num_classes": 4, "width": 2}  # channels: its default, which the card spells out
RANGE = {"input_range": (-1.0, 1.0)}
BUFFER = torch.zeros(4, 3, 32, 32)
Weights = dict[str, Tensor]


class Malicious:
    """Unpickling this creates a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


def write(weights: Weights, path: Path, zipped: bool = True) -> Path:
    if path.suffix == ".safetensors":
        save_file(weights, path)
    else:
        torch.save(weights, path, _use_new_zipfile_serialization=zipped)
    return path


def prefixed(weights: Weights) -> Weights:
    return {f"module.{name}": value for name, value in weights.items()}


LAYOUTS: dict[str, Callable[[Weights], Any]] = {
    "official": lambda w: {"model_state_dict": w, "replay_buffer": BUFFER},
    "bare": lambda w: w,
    "parallel": prefixed,
    "official-parallel": lambda w: {"model_state_dict": prefixed(w), "replay_buffer": BUFFER},
}


@pytest.fixture
def wide() -> Weights:
    return dict(WideResNet(**WIDE).state_dict())


def assert_same(network: torch.nn.Module, weights: Weights) -> None:
    loaded = network.state_dict()
    assert set(loaded) == set(weights)
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())
    assert not any(module.training for module in network.modules())


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_2019_layouts(tmp_path: Path, wide: Weights, layout: str, zipped: bool) -> None:
    path = write(LAYOUTS[layout](wide), tmp_path / "model.pt", zipped)
    state = torch.get_rng_state()
    network, card = load_foreign(path)
    assert torch.equal(torch.get_rng_state(), state)
    assert isinstance(network, WideResNet)
    assert_same(network, wide)
    architecture = {"name": "wide-resnet", **WIDE}
    assert card == {"architecture": architecture, "num_classes": 5, **RANGE, "input_shape": (3, 32, 32)}


@pytest.mark.parametrize("layout", ["bare", "parallel"])
def test_safetensors_without_card(tmp_path: Path, wide: Weights, layout: str) -> None:
    save_file(LAYOUTS[layout](wide), tmp_path / "model.safetensors")
    network, card = load_foreign(tmp_path / "model.safetensors")
    assert_same(network, wide)
    assert card["architecture"] == {"name": "wide-resnet", **WIDE}


def test_named_2019_layout_and_settings_that_disagree(tmp_path: Path, wide: Weights) -> None:
    torch.save(wide, tmp_path / "model.pth")
    assert_same(load_foreign(str(tmp_path / "model.pth"), "wide-resnet", depth=10)[0], wide)
    with pytest.raises(ValueError, match=r"expected settings that fit the shapes.*'width': 10"):
        load_foreign(tmp_path / "model.pth", "wide-resnet", width=10)


def test_ten_outputs_of_the_unused_head_do_not_matter(tmp_path: Path, wide: Weights) -> None:
    head = {"f.linear.weight": torch.ones(10, 64), "f.linear.bias": torch.ones(10)}
    torch.save({"model_state_dict": wide | head}, tmp_path / "model.pt")
    network, card = load_foreign(tmp_path / "model.pt")
    assert card["num_classes"] == 5
    assert_same(network, wide | {"f.linear.weight": torch.zeros(5, 64), "f.linear.bias": torch.zeros(5)})


def test_card_rebuilds_the_network(tmp_path: Path, wide: Weights) -> None:
    torch.save(wide, tmp_path / "model.pt")
    network, card = load_foreign(tmp_path / "model.pt")
    save_checkpoint(tmp_path / "ours.safetensors", network, card)
    again, card_again = load_foreign(tmp_path / "ours.safetensors")
    assert_same(again, wide)
    assert card_again["architecture"] == card["architecture"]
    with pytest.raises(ValueError, match="leave it out"):
        load_foreign(tmp_path / "ours.safetensors", "wide-resnet")


@pytest.mark.parametrize("name", ["model.pt", "model.CKPT", "model.safetensors"])
def test_other_architectures_are_named(tmp_path: Path, name: str) -> None:
    weights = dict(SmallResNet(**SMALL).state_dict())
    path = write(weights, tmp_path / name)
    with pytest.raises(ValueError, match="name the architecture, one of"):
        load_foreign(path)
    network, card = load_foreign(path, "small-resnet", **SMALL)
    assert_same(network, weights)
    assert card == {"architecture": {"name": "small-resnet", **SMALL, "channels": 1}, "num_classes": 4, **RANGE}


@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    [
        ("vgg", {}, "expected an architecture out of"),
        ("small-resnet", {}, "expected weights that fit"),
        ("small-resnet", {**SMALL, "widht": 3}, "'widht'"),
        ("small-resnet", {**SMALL, "width": -1}, "settings that make a small-resnet"),
        ("small-resnet", {**SMALL, "width": "two"}, "settings that make a small-resnet"),
        ("wide-resnet", {"depth": 11}, "6n \\+ 4"),
        ("wide-resnet", {"depth": 10, "width": 1}, "expected weights that fit"),
    ],
)
def test_wrong_architectures(tmp_path: Path, architecture: str, settings: dict[str, Any], message: str) -> None:
    torch.save(SmallResNet(**SMALL).state_dict(), tmp_path / "model.pt")
    with pytest.raises(ValueError, match=message):
        load_foreign(tmp_path / "model.pt", architecture, **settings)


WRONG = {
    "f.layer2.0.conv1.weight": (32, 16, 1, 1),
    "f.conv1.weight": (8, 3, 3, 3),
    "class_output.weight": (5, 65),
    "class_output.bias": (6,),
    "f.layer1.0.bn1.weight": (16,),  # a normalised network of the same code
    "f.layer1.1.conv1.weight": (16, 16, 3, 3),
}


@pytest.mark.parametrize(("name", "shape"), WRONG.items())
def test_wrong_shapes(tmp_path: Path, wide: Weights, name: str, shape: tuple[int, ...]) -> None:
    torch.save({"model_state_dict": wide | {name: torch.zeros(shape)}}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match="expected"):
        load_foreign(tmp_path / "model.pt")


def test_missing_weights_are_named(tmp_path: Path, wide: Weights) -> None:
    del wide["energy_output.bias"]
    torch.save(wide, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"(?s)model\.pt.*energy_output\.bias"):
        load_foreign(tmp_path / "model.pt")


@pytest.mark.parametrize("how", ["zip", "legacy", "plain", "protocol-0"])
def test_pickles_are_not_executed(tmp_path: Path, wide: Weights, how: str) -> None:
    path, target = tmp_path / "model.pt", tmp_path / "executed"
    content = {"model_state_dict": wide, "replay_buffer": Malicious(target)}
    if how in ("zip", "legacy"):
        torch.save(content, path, _use_new_zipfile_serialization=how == "zip")
    else:
        path.write_bytes(pickle.dumps(Malicious(target), protocol=0 if how == "protocol-0" else 4))
    with pytest.raises(ValueError, match="expected") as caught:
        load_foreign(path)
    assert not target.exists()
    assert "--unsafe-load (unsafe=True)" in str(caught.value)
    assert "executes code" in str(caught.value)
    assert "weights_only" not in str(caught.value)  # torch's own advice is to unpickle without further ado
    if how == "zip":
        load_foreign(path, unsafe=True)
        assert target.exists()


def test_pickled_objects_with_unsafe(tmp_path: Path, wide: Weights) -> None:
    path = tmp_path / "model.pt"
    torch.save({"model_state_dict": wide, "args": argparse.Namespace(depth=10)}, path)
    with pytest.raises(ValueError, match=r"argparse.Namespace.*--unsafe-load"):
        load_foreign(path)
    assert_same(load_foreign(path, unsafe=True)[0], wide)
    module = build_network("wide-resnet", **WIDE)
    torch.save(module, path)
    with pytest.raises(ValueError, match="--unsafe-load"):
        load_foreign(path)
    assert_same(load_foreign(path, unsafe=True)[0], dict(module.state_dict()))


@pytest.mark.parametrize("unsafe", [False, True])
@pytest.mark.parametrize("keep", [0, 1, 20, 0.5, 0.99])
@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])
def test_truncated_files(tmp_path: Path, wide: Weights, kind: str, keep: float, unsafe: bool) -> None:
    name = "model.safetensors" if kind == "safetensors" else "model.pt"
    path = write(wide, tmp_path / name, zipped=kind == "zip")
    whole = path.read_bytes()
    path.write_bytes(whole[: keep if isinstance(keep, int) else int(keep * len(whole))])
    with pytest.raises(ValueError, match=r"expected a whole .*: copy") as caught:
        load_foreign(path, unsafe=unsafe)
    assert str(path) in str(caught.value)
    assert "--unsafe-load" not in str(caught.value)


JUNK = [b"hello world\n" * 9, b"<html></html>", b"\x89PNG\r\n" + bytes(99), b"\x80\x02hello", b"."]


@pytest.mark.parametrize("content", JUNK)
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_foreign_files(tmp_path: Path, content: bytes, suffix: str) -> None:
    path = tmp_path / f"model{suffix}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="expected a whole"):
        load_foreign(path)


def test_zip_that_torch_did_not_write(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as file:
        file.writestr("a.txt", "hello")
    with pytest.raises(ValueError, match="expected a whole checkpoint"):
        load_foreign(tmp_path / "model.pt")


STRANGE = [{}, [], torch.zeros(3), {"model_state_dict": {}}, {"epoch": 3, "lr": 0.1}, {0: torch.zeros(3)}]


@pytest.mark.parametrize("content", STRANGE)
def test_other_contents(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "model.pt")
    with pytest.raises(ValueError, match="expected a state dict, alone or under 'model_state_dict', got"):
        load_foreign(tmp_path / "model.pt")


@pytest.mark.parametrize("name", ["none.pt", "none.safetensors", "", "model.bin"])
def test_no_checkpoint_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ValueError, match=r"expected a (checkpoint file|file ending in .pt)"):
        load_foreign(tmp_path / name)
