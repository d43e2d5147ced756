"""`jem-robust attack`: robustness of a model, from one command."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jem_robust.commands.output import output_folder
from jem_robust.commands.presets import PRESETS, settings
from jem_robust.commands.types import (
    EOT,
    RESULT_FOLDER,
    AttackCommand,
    Epsilons,
    Memory,
    Norm,
    attack_arguments,
    config_option,
)

if TYPE_CHECKING:
    from jem_robust.classifier import JEMClassifier
    from jem_robust.evaluation.curve import RobustnessCurve

TUNED = (
    "eps", "limit", "iterations", "restarts", "eot", "attack_chains", "keep", "select_draws", "draws", "max_queries",
)  # fmt: skip
BAR_SHARE = 32  # of the images one is tried beforehand, so that the bar knows how much there is to do
ATTACK_SETTINGS = ("iterations", "restarts", "eot", "loss", "keep", "max_queries")

EXAMPLE = """
\b
Example:
  jem-robust attack --norm linf --steps 10 --eps 4/255,8/255
"""


@click.command("attack", cls=AttackCommand, epilog=EXAMPLE)
@config_option
@click.option(
    "--norm",
    type=Norm("linf", "l2", "l0"),
    default="linf",
    show_default=True,
    help="Norm of the perturbation: linf or l2 (l0: pixels, for pointwise).",
)
@click.option(
    "--steps",
    type=click.IntRange(0),
    metavar="K",
    help="SGLD steps of the classifier before it classifies (0: plain).  [default: the model's]",
)
@click.option("--eps", type=Epsilons(), help="Perturbation sizes in [0, 1] pixel units, e.g. 2/255,8/255; 0 is added.")
@click.option(
    "--attack",
    "attack",
    multiple=True,
    metavar="NAME",
    help="transfer (attack k = 0), pgd, boundary, pointwise, rays, square, or a toolkit's: art:NAME, foolbox:NAME, "
    "torchattacks:NAME; repeat for the per-image worst case.  [default: transfer and pgd; K = 0: pgd; l0: pointwise]",
)
@click.option(
    "--attack-arg",
    multiple=True,
    metavar="KEY=VALUE",
    help="An argument of the --attack before it, e.g. max_iter=20; repeatable. Toolkits' attacks take nothing else.",
)
@click.option(
    "--gradient",
    type=click.Choice(["exact", "straight-through"]),
    default="exact",
    show_default=True,
    help="How attacks differentiate the refinement.",
)
@click.option(
    "--precision",
    type=click.Choice(["float32", "bf16"]),
    default="float32",
    show_default=True,
    help="Of attack gradients; verdicts always are in the network's own. bf16: faster where the processor has it.",
)
@click.option(
    "--preset",
    type=click.Choice(list(PRESETS)),
    default="quick",
    show_default=True,
    help="Sizes of what follows. quick: 64 images, 3 eps, 10 iterations, 1 chain a gradient, 4 select and 8 judge "
    "draws; standard: 200 images, 6 eps, 40 iterations, 10 and 20 draws; paper (days on 2 cores): 300 images, "
    "20 restarts, 5 chains a gradient.",
)
@click.option("--iterations", type=click.IntRange(1), help="Gradient steps of the attack.")
@click.option("--restarts", type=click.IntRange(1), help="Starts of the attack, the first at the image.")
@click.option("--eot", type=EOT(), help="Draws averaged per attack gradient; auto: as many as the gradient needs.")
@click.option(
    "--loss",
    type=click.Choice(["ce", "margin", "dlr"]),
    default="ce",
    show_default=True,
    help="Loss that gradient attacks climb.",
)
@click.option("--max-queries", type=click.IntRange(1), help="Draws a black-box attack may spend per image.")
@click.option("--chains", type=click.IntRange(1), help="Chains the classifier averages.  [default: the model's]")
@click.option("--attack-chains", type=click.IntRange(1), help="Chains run per attack gradient.")
@click.option("--draws", type=click.IntRange(1), help="Fresh draws on which each image is judged.")
@click.option("--select-draws", type=click.IntRange(1), help="Draws on which the worst candidate is selected.")
@click.option("--keep", type=click.IntRange(0), help="Best candidates by loss an attack hands over beside its last.")
@click.option("--limit", type=click.IntRange(1), help="Number of test images, class-balanced.")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), default=0, show_default=True, help="Seed of all noise.")
@click.option(
    "--model",
    default="jem-fashion-mnist",
    show_default=True,
    metavar="NAME|FILE|MODULE:FACTORY",
    help="Embedded name, checkpoint (.safetensors, 2019 .pt) or factory.",
)
@click.option("--architecture", metavar="NAME", help="Network of a checkpoint without a card.")
@click.option("--unsafe-load", is_flag=True, help="Unpickle a checkpoint: runs whatever code it holds.")
@click.option(
    "--data",
    default="fashion-mnist",
    show_default=True,
    metavar="NAME|PATH",
    help="Embedded name, .npz (images, labels), image folder, idx or CIFAR-10 binary folder.",
)
@click.option("--device", default="cpu", show_default=True, help="Torch device.")
@click.option("--memory", type=Memory(), default="1GB", show_default=True, help="Budget of the attack's graphs.")
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    help="Images attacked at once; toolkits' results depend on it.  [default: 64 to 256]",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False),
    metavar="DIR",
    help="Folder for the results.  [default: jem-robust-results/MODEL-kK-NORM]",
)
@click.option("--resume", is_flag=True, help="Go on with an interrupted run of the same settings in --out.")
@click.option("--estimate", is_flag=True, help="Print expected forwards, time and memory, and stop.")
@click.option("--strict", is_flag=True, help="Exit 3 if a warning stands.")
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> int:
    """Attack a classifier and print its accuracy over perturbation size, judged on fresh noise.

    Writes result.json, adversarials.npz (every judged image) and curve.png.
    """
    norm = options["norm"]
    chosen = settings(options["preset"], norm, {name: options[name] for name in TUNED})
    options = {**options, **chosen}
    if ctx.get_parameter_source("attack") is not ctx.get_parameter_source("attack_arg"):
        options["attack_arg"] = ()  # of a config's attacks, which others given by hand replace
    model = load(options)
    from jem_robust.images import load_images

    images, labels = load_images(options["data"], options["limit"])
    usual = ["pointwise"] if norm == "l0" else ["transfer", "pgd"] if model.refinement.steps else ["pgd"]
    options["attack"] = list(options["attack"]) or usual
    options["eps"] = sorted({0.0, *options["eps"]})
    check_taken(ctx, options)
    name = Path(str(model.card.get("name", "model"))).stem
    # An interrupted run goes on where its result.json lies; a finished one is repeated elsewhere.
    partial = ctx.meta.get(RESULT_FOLDER) if options["resume"] else None
    out = Path(options.pop("out") or partial or f"jem-robust-results/{name}-k{model.refinement.steps}-{norm}")
    if options.pop("estimate"):
        from jem_robust.commands.report import print_estimate

        print_estimate(model, images, labels, evaluation_arguments(options))
        return 0
    with output_folder(out), warnings.catch_warnings():
        # The check global_noise says it among the others.
        warnings.filterwarnings("ignore", message="the network draws from torch's global")
        curve = measure(model, images, labels, options, out)
    from jem_robust.commands.report import print_curve

    print_curve(curve, [out / f for f in ("result.json", "adversarials.npz", "curve.png")])
    return 3 if options["strict"] and curve.warnings else 0


def load(options: dict[str, Any]) -> "JEMClassifier":
    """The model the options ask for."""
    from jem_robust.models import load_model

    model = load_model(
        options["model"], options["steps"], gradient=options["gradient"], seed=options["seed"],
        device=options["device"], memory=options["memory"], architecture=options["architecture"],
        unsafe=options["unsafe_load"],
    )  # fmt: skip
    return model.with_refinement(chains=options["chains"]) if options["chains"] else model


def evaluation_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Keywords of jem_robust.evaluate from the options."""
    from jem_robust.evaluation.members import from_name

    taken = {k: options[k] for k in ATTACK_SETTINGS}
    names = options["attack"]
    arguments = attack_arguments(options["attack_arg"], names)
    return {
        "norm": options["norm"],
        "epsilons": options["eps"],
        "attacks": [from_name(n, options["norm"], a, **taken) for n, a in zip(names, arguments, strict=True)],
        "draws": options["draws"],
        "select_draws": options["select_draws"],
        "seed": options["seed"],
        "batch_size": options["batch_size"],
        "attack_chains": options["attack_chains"],
        "precision": options["precision"],
    }


def check_taken(ctx: click.Context, options: dict[str, Any]) -> None:
    """A usage error for options given by hand that no attack of the run takes."""
    from click.core import ParameterSource

    from jem_robust.evaluation.members import arguments_taken, settings_taken

    by_hand = {ParameterSource.COMMANDLINE}
    if RESULT_FOLDER not in ctx.meta:  # a result.json holds the presets' defaults too
        by_hand.add(ParameterSource.DEFAULT_MAP)
    attacks = evaluation_arguments(options)["attacks"]
    taken = set().union(*(settings_taken(attack) for attack in attacks))
    ignored = [name for name in ATTACK_SETTINGS if name not in taken and ctx.get_parameter_source(name) in by_hand]
    if ignored:
        first = ", ".join(f"{name}=..." for name in arguments_taken(attacks[0]))
        raise click.UsageError(
            f"expected options that {' or '.join(options['attack'])} takes, got "
            f"{', '.join('--' + name.replace('_', '-') for name in ignored)}: "
            f"after --attack {options['attack'][0]} pass --attack-arg {first}",
            ctx,
        )


def measure(model: Any, images: Any, labels: Any, options: dict[str, Any], out: Path) -> "RobustnessCurve":
    """Evaluate, saving after every eps; an interrupt leaves what was finished, to be resumed."""
    from jem_robust.evaluation.curve import RobustnessCurve
    from jem_robust.evaluation.estimate import FEW, estimate
    from jem_robust.evaluation.robustness import evaluate

    arguments = evaluation_arguments(options)
    kept = {k: v for k, v in options.items() if k not in ("resume", "strict")}

    def save(curve: "RobustnessCurve") -> None:
        curve.about["command"] = {"name": "attack", "options": kept}
        curve.save(out)

    earlier = RobustnessCurve.load(out) if options["resume"] else None
    if earlier is not None and earlier.about.get("command", {}).get("options") != _through_json(kept):
        raise ValueError(f"expected the settings of the partial result in {out}, got others: repeat its command")
    try:
        few = max(1, min(FEW, len(images) // BAR_SHARE))
        work = estimate(model, images, labels, probe_images=few, **arguments).rows
        return evaluate(
            model, images, labels, **arguments, progress=True, resume=earlier, on_epsilon=save, expected_work=work
        )
    except KeyboardInterrupt:
        if (out / "result.json").exists():
            click.echo(
                f"What was finished is in {out}; go on with: jem-robust attack --config {out}/result.json --resume",
                err=True,
            )
        else:
            click.echo("Nothing was finished yet.", err=True)
        raise


def _through_json(value: Any) -> Any:
    import json

    return json.loads(json.dumps(value))
