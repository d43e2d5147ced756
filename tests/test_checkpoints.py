"""Checkpoints come back as they were; whatever is no checkpoint says so; files are whole or not there."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from jem_robust.checkpoints import CARD_KEY, file_hash, load_checkpoint, load_weights, read_card, save_checkpoint
from jem_robust.files import replacing
from jem_robust.networks.small import SmallResNet

ARCHITECTURE = {"name": "small-resnet", "channels": 1, "num_classes": 3, "width": 2}


def network() -> SmallResNet:
    return SmallResNet(1, 3, 2)


def carded(path: Path, card: Any) -> Path:
    weights = {name: value.contiguous() for name, value in network().state_dict().items()}
    save_file(weights, path, {CARD_KEY: card if isinstance(card, str) else json.dumps(card)})
    return path


def test_round_trip(tmp_path: Path) -> None:
    saved = network().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    path = tmp_path / "new" / "folder" / "model.safetensors"
    save_checkpoint(path, saved, {"architecture": ARCHITECTURE, "input_range": (-1.0, 1.0), "metrics": {"a": 0.5}})
    state = torch.get_rng_state()
    loaded, card = load_checkpoint(path)
    assert torch.equal(torch.get_rng_state(), state)
    assert card == read_card(path)
    assert card["architecture"] == ARCHITECTURE
    assert card["input_range"] == [-1, 1]
    assert card["card_version"] == 1
    assert not loaded.training
    assert all(torch.equal(v, saved.state_dict()[k]) for k, v in loaded.state_dict().items())
    assert len(file_hash(path)) == 64
    assert os.listdir(path.parent) == ["model.safetensors"]
    if os.name == "posix":
        mask = os.umask(0)
        os.umask(mask)
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def test_shared_weights_can_be_saved(tmp_path: Path) -> None:
    tied = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    save_checkpoint(tmp_path / "tied.safetensors", tied, {"architecture": ARCHITECTURE})
    assert read_card(tmp_path / "tied.safetensors")["architecture"] == ARCHITECTURE


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_truncated(tmp_path: Path, keep: int) -> None:
    path = carded(tmp_path / "model.safetensors", {"architecture": ARCHITECTURE})
    path.write_bytes(path.read_bytes()[:keep])
    for load in (read_card, load_checkpoint):
        with pytest.raises(ValueError, match=r"expected a whole \.safetensors file, got .*copy or save it again"):
            load(path)


def test_foreign(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for content in (b"PK\x03\x04 not this", b"\x80\x02}q\x00.", b"{}" * 99, b"\xff" * 64):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="expected a whole"):
            load_checkpoint(path)
    for missing in (tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(ValueError, match="expected a whole"):
            load_checkpoint(missing)


@pytest.mark.parametrize("card", [[1, 2], "text", 3, None, "{broken", '"architecture"'])
def test_card_that_is_no_dict(tmp_path: Path, card: Any) -> None:
    with pytest.raises(ValueError, match=r"expected a (card of named entries|whole)"):
        load_checkpoint(carded(tmp_path / "model.safetensors", card))


def test_no_card(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert read_card(tmp_path / "model.safetensors") == {}
    with pytest.raises(ValueError, match="with a jem-robust card"):
        load_checkpoint(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ({"width": 2}, "an architecture with a name"),
        ({"name": 3}, "an architecture with a name"),
        (None, "an architecture with a name"),
        ("small-resnet", "an architecture with a name"),
        (["name", "small-resnet"], "an architecture with a name"),
        ({**ARCHITECTURE, "name": "vgg"}, "expected an architecture out of"),
        ({**ARCHITECTURE, "widht": 2}, "widht"),
        ({**ARCHITECTURE, "architecture": "small-resnet"}, "architecture"),
        ({**ARCHITECTURE, "width": "two"}, "settings that make a small-resnet"),
        ({**ARCHITECTURE, "width": None}, "settings that make a small-resnet"),
        ({**ARCHITECTURE, "width": 2.5}, "in .*model.safetensors"),
        ({**ARCHITECTURE, "width": -2}, "settings that make a small-resnet"),
        ({**ARCHITECTURE, "num_classes": 4}, "expected weights that fit the network"),
    ],
)
def test_bad_architecture(tmp_path: Path, architecture: Any, message: str) -> None:
    path = carded(tmp_path / "model.safetensors", {"architecture": architecture})
    with pytest.raises(ValueError, match=message):
        load_checkpoint(path)


def test_weights_that_do_not_fit_name_file_and_remedy() -> None:
    with pytest.raises(
        ValueError, match=r"got here, which fits another architecture or other settings: (.|\n)*stem.weight"
    ):
        load_weights(network(), {"other": torch.zeros(1)}, "here")


def test_a_card_that_is_no_json_leaves_the_old_file(tmp_path: Path) -> None:
    path = carded(tmp_path / "model.safetensors", {"architecture": ARCHITECTURE})
    before = path.read_bytes()
    with pytest.raises(TypeError):
        save_checkpoint(path, network(), {"bad": object()})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_replacing_is_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with replacing(path) as temporary:
        temporary.write_text("first")
        assert temporary.suffix == ".txt"
        assert not path.exists()

    def interrupted() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "first"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_directories_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "inside").write_text("")
    for target in (tmp_path / "file" / "model.txt", tmp_path / "taken"):
        with pytest.raises(OSError), replacing(target) as temporary:  # noqa: PT011
            temporary.write_text("x")
    assert sorted(os.listdir(tmp_path)) == ["file", "taken"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_directory(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        save_checkpoint(tmp_path / "model.safetensors", network(), {})
    tmp_path.chmod(0o700)
