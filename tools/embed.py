"""Make the files in jem_robust/assets from Fashion-MNIST and finished trainings.

    python tools/embed.py images /usr/share/datasets/fashion-mnist
    python tools/embed.py model runs/jem/model.safetensors jem-fashion-mnist /usr/share/datasets/fashion-mnist

`images` writes 1,000 class-balanced test images. `model` adds accuracies on all 10,000 test images to a checkpoint's
card (chosen on the validation split: nothing is selected here) and copies it under its name.
"""

import json
import sys
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from jem_robust.checkpoints import load_checkpoint, save_checkpoint
from jem_robust.classifier import JEMClassifier
from jem_robust.images import ASSETS, load_images
from jem_robust.langevin import Refinement

EMBEDDED_IMAGES = 1000
DESCRIPTIONS = {
    "jem-fashion-mnist": "JEM of Fashion-MNIST: small residual network, classifies after 10 SGLD steps",
    "baseline-fashion-mnist": "the same network and data as jem-fashion-mnist, trained with plain cross-entropy",
}
LICENCE = "MIT (weights and Fashion-MNIST, Zalando SE)"


def embed_images(source: str) -> None:
    """Write assets/fashion-mnist-test.npz and its card."""
    images, labels = load_images(source, limit=EMBEDDED_IMAGES)
    pixels = (images * 255).round().to(torch.uint8).numpy()
    np.savez_compressed(ASSETS / "fashion-mnist-test.npz", images=pixels, labels=labels.numpy().astype(np.uint8))
    card = {
        "name": "fashion-mnist",
        "description": "1,000 of the 10,000 Fashion-MNIST test images, class-balanced, in the order of --limit",
        "source": "Xiao, Rasul & Vollgraf 2017, arXiv 1708.07747; Debian package dataset-fashion-mnist",
        "licence": "MIT, Copyright (c) 2017 Zalando SE",
        "command": "python tools/embed.py images /usr/share/datasets/fashion-mnist",
    }
    (ASSETS / "fashion-mnist-test.json").write_text(json.dumps(card, indent=2) + "\n")


def embed_model(checkpoint: str, name: str, source: str) -> None:
    """Copy a checkpoint under its embedded name with test accuracies on its card."""
    network, card = load_checkpoint(checkpoint)
    images, labels = load_images(source)
    metrics: dict[str, Any] = {**card["metrics"]}
    refinement = Refinement(**{**card["refinement"], "chains": 5})
    for k in (0, 1, 10) if refinement.steps else (0,):
        model = JEMClassifier(network, refinement.updated(steps=k), tuple(card["input_range"]))
        hits = sum(
            int((model(x).argmax(1) == y).sum()) for x, y in zip(images.split(250), labels.split(250), strict=True)
        )
        metrics[f"test_accuracy_k{k}"] = hits / len(labels)
        print(name, k, metrics[f"test_accuracy_k{k}"])
    objective, iterations = card["training"]["objective"], card["training"]["iterations"]
    command = f"jem-robust train --data {source} --objective {objective} --iterations {iterations} --out runs/{name}"
    about = {"name": name, "description": DESCRIPTIONS[name], "data": source, "licence": LICENCE, "command": command}
    card = {**card, **about, "refinement": asdict(refinement), "metrics": metrics}
    save_checkpoint(ASSETS / f"{name}.safetensors", network, card)


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in ("images", "model"):
        sys.exit(__doc__)
    (embed_images if sys.argv[1] == "images" else embed_model)(*sys.argv[2:])
