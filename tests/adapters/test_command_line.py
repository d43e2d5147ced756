"""Attacks of the toolkits from our command line, judged by our verdict."""

import json
from pathlib import Path

import numpy as np
import pytest

from jem_robust.cli import run
from tests.test_cli import tiny
from tests.worlds import images


def test_toolkit_attacks_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = images(4, seed=3).float()
    np.savez(tmp_path / "data.npz", images=x.numpy(), labels=tiny().with_refinement(steps=0)(x).argmax(1).numpy())
    options = ["attack", "--model", "tests.test_cli:tiny", "--data", str(tmp_path / "data.npz"), "--limit", "4"]
    options += ["--eps", "0.1", "--out", str(tmp_path / "out")]
    attacks = ["--attack", "art:ProjectedGradientDescent", "--attack-arg", "max_iter=3"]
    attacks += ["--attack", "foolbox:LinfPGD", "--attack-arg", "steps=2", "--attack", "torchattacks:FGSM"]
    assert run([*options, *attacks]) == 0
    record = json.loads((tmp_path / "out" / "result.json").read_text())
    names = ["art:ProjectedGradientDescent", "foolbox:LinfPGD", "torchattacks:FGSM"]
    assert [attack["name"] for attack in record["per_attack"][1]["attacks"]] == names
    assert [attack["arguments"] for attack in record["attacks"]] == [{"max_iter": 3}, {"steps": 2}, {}]
    printed = capsys.readouterr().out
    assert "art:ProjectedGradientDescent" in printed
    for bad, message in (("art:ProjectedGradientDecent", "did you mean"), ("foolboks:LinfPGD", "foolbox")):
        assert run([*options, "--attack", bad]) == 2
        assert message in capsys.readouterr().err
