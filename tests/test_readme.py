"""Every command and snippet of the README runs as it stands (the long training with fewer iterations)."""

import gzip
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import jem_robust as jr

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.S)
COMMANDS = [
    shlex.split(line, comments=True)
    for language, text in BLOCKS
    for line in text.splitlines()
    if language == "sh" and line.startswith("jem-robust")
]


def run(command, folder):
    arguments = [sys.executable, "-m", "jem_robust", *command[1:]]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'attacks'}"}
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("readme")


@pytest.mark.parametrize("command", [c for c in COMMANDS if c[1] != "train"], ids=" ".join)
def test_commands(command, folder):
    assert run(command, folder)  # in the README's order: later ones read what earlier ones wrote


def idx(values):
    header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes()
    return gzip.compress(header + values.tobytes())


@pytest.mark.parametrize("command", [c for c in COMMANDS if c[1] == "train"], ids=" ".join)
def test_the_training_command(command, folder):
    data = folder / "fashion"
    data.mkdir(exist_ok=True)
    images, labels = jr.load_images("fashion-mnist")
    pixels = (images[:, 0] * 255).round().numpy().astype(np.uint8)
    (data / "train-images-idx3-ubyte.gz").write_bytes(idx(pixels))
    (data / "train-labels-idx1-ubyte.gz").write_bytes(idx(labels.numpy().astype(np.uint8)))
    command = ["2" if command[i - 1] == "--iterations" else word for i, word in enumerate(command)]
    command = [str(data) if word.startswith("/usr/share/datasets") else word for word in command]
    assert "model.safetensors" in run(command, folder)


def test_snippets(folder):
    snippets = [text for language, text in BLOCKS if language == "python"]
    assert snippets
    for text in snippets:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'attacks'}"}
        strict = [] if "foolbox" in text else ["-W", "error"]  # Foolbox 3.3.4 warns at import: SciPy's old names
        command = [sys.executable, *strict, "-c", text]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_make_targets_named_in_the_readme_exist():
    targets = set(re.findall(r"^make (\S+)", README, re.M))
    assert targets >= {"demo", "test"}
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)
    for link in re.findall(r"\]\((?!http)([^)]+)\)", README):
        assert (ROOT / link).exists(), link
