"""`jem-robust train`: a JEM or a plain classifier from images."""

from typing import Any

import click

from jem_robust.commands.types import config_option

EXAMPLE = """
\b
Example:
  jem-robust train --data /usr/share/datasets/fashion-mnist --iterations 7500 --out runs/jem
"""


@click.command("train", epilog=EXAMPLE)
@config_option
@click.option("--data", required=True, metavar="PATH", help="Training images: .npz, image, idx or CIFAR-10 folder.")
@click.option(
    "--out",
    default="runs/jem",
    show_default=True,
    metavar="DIR",
    help="Folder for model.safetensors and training-state.pt.",
)
@click.option(
    "--objective",
    type=click.Choice(["jem", "ce"]),
    default="jem",
    show_default=True,
    help="jem: log p(y|x) + log p(x); ce: plain cross-entropy.",
)
@click.option("--iterations", type=click.IntRange(1), default=7500, show_default=True, help="Optimizer steps.")
@click.option("--batch-size", type=click.IntRange(1), default=64, show_default=True, help="Images per step.")
@click.option(
    "--learning-rate",
    type=click.FloatRange(0, min_open=True),
    default=1e-3,
    show_default=True,
    help="Of Adam, after the warm-up.",
)
@click.option("--warmup", type=click.IntRange(0), default=500, show_default=True, help="Iterations of linear rise.")
@click.option(
    "--width", type=click.IntRange(1), default=16, show_default=True, help="Channels of the first convolution."
)
@click.option(
    "--data-noise",
    type=click.FloatRange(0),
    default=0.05,
    show_default=True,
    help="Noise on training images, in network units (range -1 to 1).",
)
@click.option(
    "--starts",
    type=click.Choice(["class-gaussian", "uniform"]),
    default="class-gaussian",
    show_default=True,
    help="Where chains start.",
)
@click.option("--sgld-steps", type=click.IntRange(1), default=10, show_default=True, help="SGLD steps per iteration.")
@click.option("--sgld-step-size", type=click.FloatRange(0), default=1.0, show_default=True, help="In network units.")
@click.option("--sgld-noise", type=click.FloatRange(0), default=0.01, show_default=True, help="In network units.")
@click.option("--clamp/--no-clamp", default=True, show_default=True, help="Clip chains to the input range.")
@click.option(
    "--precision",
    type=click.Choice(["auto", "bf16", "float32"]),
    default="auto",
    show_default=True,
    help="Of the sampling; the training step is float32. auto: bf16 where the processor computes in it.",
)
@click.option(
    "--gap-penalty",
    type=click.FloatRange(0),
    default=10.0,
    show_default=True,
    help="Weight of the squared energy gap in the loss: keeps the energy from outrunning the sampler.",
)
@click.option(
    "--averaging",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.998,
    show_default=True,
    help="Decay of the running mean of the weights that is validated and saved; 0 for the last weights.",
)
@click.option(
    "--gap-limit",
    type=click.FloatRange(0, min_open=True),
    default=3.0,
    show_default=True,
    help="Largest healthy |log p(data) - log p(samples)|.",
)
@click.option("--retries", type=click.IntRange(0), default=3, show_default=True, help="Divergences to recover from.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of weights, order, noise.")
@click.option("--name", help="Name on the model's card.  [default: the folder's]")
@click.option("--resume", is_flag=True, help="Go on from training-state.pt in --out.")
def command(**options: Any) -> int:
    """Train a network and keep the checkpoint of best validation accuracy, with a card that says how it was made.

    A divergence (NaN, energy gap out of range) is rolled back with a lower learning rate.
    """
    import shlex
    import sys
    from pathlib import Path

    from jem_robust.commands.output import output_folder
    from jem_robust.images import EMBEDDED, load_images
    from jem_robust.langevin import Refinement
    from jem_robust.training.run import train
    from jem_robust.training.trainer import TrainingSettings

    if options["data"] in EMBEDDED:
        raise ValueError(f"expected training images, got {options['data']}, the embedded test images: pass a folder")
    out = Path(options["out"])
    sampler = Refinement(
        options["sgld_steps"], options["sgld_step_size"], options["sgld_noise"], chains=1, clamp=options["clamp"]
    )
    same = ("objective", "iterations", "batch_size", "learning_rate", "warmup", "data_noise", "starts", "precision",
            "gap_penalty", "averaging", "gap_limit", "retries", "seed")  # fmt: skip
    images, labels = load_images(options["data"], split="train")
    held = min(5000, len(images) // 10)
    settings = TrainingSettings(**{k: options[k] for k in same}, sampler=sampler, validation_images=max(1, held))
    about = {
        "name": options["name"] or out.name,
        "data": str(options["data"]),
        "command": shlex.join(["jem-robust", *sys.argv[1:]]),
    }
    with output_folder(out):
        metrics = train(images, labels, settings, out, width=options["width"], about=about, resume=options["resume"])
    click.echo(", ".join(f"{k} {v:.4g}" for k, v in metrics.items()))
    click.echo(out / "model.safetensors")
    return 0
