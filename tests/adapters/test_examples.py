"""The examples of the toolkits on the tiny model in place of the embedded one."""

import runpy
from pathlib import Path

import pytest

import jem_robust
from tests.adapters.world import batch, jem

FOLDER = Path(__file__).parents[2] / "examples"
NAMES = {
    "art_pipeline": "art", "foolbox_pipeline": "foolbox", "torchattacks_pipeline": "torchattacks",
    "autoattack_rand": "torchattacks",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_example(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(NAMES[name], reason="a toolkit that is not installed")
    file = FOLDER / f"{name}.py"
    assert len(file.read_text().splitlines()) < 40
    model = jem(1)
    monkeypatch.setattr(jem_robust, "load_model", lambda source, steps: model, raising=False)
    monkeypatch.setattr(jem_robust, "load_images", lambda source, limit: batch(model), raising=False)
    runpy.run_path(str(file), run_name="__main__")
    printed = capsys.readouterr().out
    assert "jr.evaluate, the same attack: 0." in printed
    assert "They may differ because" in printed
