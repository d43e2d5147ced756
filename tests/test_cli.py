"""The command line, run in this process on a tiny model; the embedded model has its own tests."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml

import jem_robust as jr
from jem_robust.cli import run
from tests.worlds import NoisyNet, images, quick, smooth_cnn


def tiny():
    return jr.JEMClassifier(smooth_cnn(), quick(), card={"name": "tiny"}, input_shape=(1, 5, 5), num_classes=3)


def nan():
    class Bad(torch.nn.Module):
        def forward(self, x):
            return x.flatten(1)[:, :3] * torch.nan

    return Bad()


def wrong_shape():
    return torch.nn.Flatten(0)


def soft():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(25, 3), torch.nn.Softmax(1))


@pytest.fixture
def data(tmp_path):
    x = images(12, seed=3, dtype=torch.float32)
    y = tiny().with_refinement(steps=0)(x).argmax(1)
    np.savez(tmp_path / "data.npz", images=x.numpy(), labels=y.numpy())
    return tmp_path / "data.npz"


def attack(data, out, *more, model="tiny", iterations=("--iterations", "2")):
    return run(
        ["attack", "--model", f"tests.test_cli:{model}", "--data", str(data), "--out", str(out), *iterations,
         "--limit", "6", *more]
    )  # fmt: skip


def test_attack_prints_the_table_and_writes_the_files(data, tmp_path, capsys):
    out = tmp_path / "out"
    assert attack(data, out, "--norm", "Linf", "--eps", "0.1,8/255", "--steps", "2") == 0
    printed = capsys.readouterr().out
    table = ("eps (linf)", "8/255", "95 % interval", "images broken by", "transfer", "clean accuracy")
    basis = ("n 6", "8 judge", "seed 0", "fresh noise")
    for text in (*table, *basis, *(str(out / name) for name in ("result.json", "adversarials.npz", "curve.png"))):
        assert text in printed
    record = json.loads((out / "result.json").read_text())
    assert record["epsilons"] == [0, 8 / 255, 0.1]
    assert record["complete"]
    assert record["spent"]["forwards"] > 0
    assert record["spent"]["backwards"] > 0
    assert record["refinement"]["steps"] == 2
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in out.iterdir()) == ["adversarials.npz", "curve.png", "result.json"]


def test_config_repeats_a_run_and_options_win(data, tmp_path, capsys):
    first, second, third = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    assert attack(data, first, "--eps", "0.1", "--seed", "3", "--attack", "pgd", "--draws", "3") == 0
    assert run(["attack", "--config", str(first / "result.json"), "--out", str(second)]) == 0
    a, b = (json.loads((d / "result.json").read_text()) for d in (first, second))
    for key in ("epsilons", "accuracy", "raw", "low", "high", "clean", "n", "norm", "seed", "draws"):
        assert a[key] == b[key]
    np.testing.assert_array_equal(
        np.load(first / "adversarials.npz")["images"], np.load(second / "adversarials.npz")["images"]
    )
    settings = {"model": "tests.test_cli:tiny", "data": str(data), "eps": [0.2], "limit": 4, "iterations": 1,
                "out": str(third), "attack": ["pgd"], "select-draws": 2}  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    assert run(["attack", "--config", str(tmp_path / "run.yaml"), "--limit", "5"]) == 0
    record = json.loads((third / "result.json").read_text())
    assert (record["n"], record["select_draws"], record["epsilons"]) == (5, 2, [0, 0.2])
    (tmp_path / "run.yaml").write_text("no_such_option: 1")
    assert run(["attack", "--config", str(tmp_path / "run.yaml")]) == 2
    assert "no_such_option" in capsys.readouterr().err


def test_estimate_prints_and_stops(data, tmp_path, capsys):
    assert attack(data, tmp_path / "out", "--estimate") == 0
    printed = capsys.readouterr().out
    assert "expected" in printed
    assert "forwards" in printed
    assert "GB" in printed
    assert not (tmp_path / "out").exists()


def test_plot_draws_several_results(data, tmp_path, capsys):
    for name, norm in (("a", "linf"), ("b", "l2")):
        assert attack(data, tmp_path / name, "--norm", norm, "--eps", "0.1", "--attack", "pgd") == 0
    figure = tmp_path / "both.png"
    assert run(["plot", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(figure)]) == 0
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert "minus" not in capsys.readouterr().out  # two norms have no difference
    assert attack(data, tmp_path / "c", "--norm", "linf", "--eps", "0.1", "--attack", "pgd", "--steps", "0") == 0
    assert run(["plot", str(tmp_path / "a"), str(tmp_path / "c"), "-o", str(figure)]) == 0
    assert "paired over 6 images" in capsys.readouterr().out
    assert run(["plot", str(tmp_path / "missing"), "-o", str(figure)]) == 2
    assert run(["plot", str(tmp_path / "a"), "-o", str(tmp_path / "x.exe")]) == 2
    assert "result folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--norm", "l7"], "linf, l2"),
        (["--model", "no-such-model"], "jem-fashion-mnist"),
        (["--model", "tests.test_cli:missing"], "importable"),
        (["--data", "no-such-data"], "fashion-mnist"),
        (["--eps", "nan"], "epsilon"),
        (["--eps", "-1"], "epsilon"),
        (["--eps", "8/0"], "epsilon"),
        (["--eps", "much"], "epsilon"),
        (["--steps", "-1"], "steps"),
        (["--limit", "0"], "limit"),
        (["--attack", "pgdd"], "did you mean pgd"),
        (["--attack", "pgd", "--eot", "0"], "auto"),
        (["--memory", "lots"], "512MB"),
        (["--device", "gpu7"], "device"),
        (["--out", "/proc/nowhere"], "--out"),
    ],
)
def test_bad_usage_is_two_lines_and_exit_2(data, tmp_path, capsys, options, message):
    assert attack(data, tmp_path / "out", *options) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert not (tmp_path / "out" / "result.json").exists()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": np.full((4, 1, 5, 5), 2.0), "labels": np.zeros(4, int)}, "rescale"),
        ({"images": np.full((4, 1, 5, 5), 7), "labels": np.zeros(4, int)}, "divide"),
        ({"images": np.full((4, 1, 5, 5), np.nan), "labels": np.zeros(4, int)}, "NaN"),
        ({"images": np.zeros((4, 3, 5, 5)), "labels": np.zeros(4, int)}, "shape"),
        ({"images": np.zeros((4, 2, 5, 5)), "labels": np.zeros(4, int)}, "channels"),
        ({"images": np.zeros((0, 1, 5, 5)), "labels": np.zeros(0, int)}, "none"),
        ({"images": np.zeros((4, 1, 5, 5)), "labels": np.full(4, 3)}, "labels from 0"),
        ({"images": np.zeros((4, 1, 5, 5)), "labels": np.zeros(3, int)}, "labels"),
        ({"images": np.zeros((4, 1, 5, 5)), "labels": np.array([{}] * 4)}, "pickled"),
        ({"pixels": np.zeros((4, 1, 5, 5))}, "images and labels"),
    ],
)
def test_bad_data_is_exit_2_and_writes_nothing(tmp_path, capsys, arrays, message):
    np.savez(tmp_path / "bad.npz", **arrays)
    assert attack(tmp_path / "bad.npz", tmp_path / "out") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "result.json").exists()


def test_bad_checkpoints_are_exit_2(data, tmp_path, capsys):
    for name, content in (("cut.safetensors", b"\x10\x00"), ("foreign.pt", b"not a checkpoint"), ("x.bin", b"?")):
        (tmp_path / name).write_bytes(content)
        assert (
            run(["attack", "--model", str(tmp_path / name), "--data", str(data), "--out", str(tmp_path / "out")]) == 2
        )
        captured = capsys.readouterr().err
        assert name in captured
        assert "Traceback" not in captured


def test_a_network_of_the_wrong_output_shape_is_exit_2(data, tmp_path, capsys):
    assert attack(data, tmp_path / "out", model="wrong_shape") == 2
    assert "logits" in capsys.readouterr().err


def test_strict_turns_warnings_into_exit_3(data, tmp_path, capsys):
    assert attack(data, tmp_path / "a", "--steps", "0", model="soft") == 0
    assert "probabilities" in capsys.readouterr().out
    assert attack(data, tmp_path / "b", "--steps", "0", "--strict", model="soft") == 3
    assert attack(data, tmp_path / "c", "--steps", "0", "--strict", model="nan") == 3
    record = json.loads((tmp_path / "c" / "result.json").read_text())
    assert set(record["accuracy"]) == {0.0}
    assert record["clean"] == 0


def test_an_interrupted_run_is_130_saved_and_resumable(data, tmp_path, capsys, monkeypatch):
    from jem_robust.evaluation.robustness import Evaluation

    whole, out = tmp_path / "whole", tmp_path / "out"
    assert attack(data, whole, "--eps", "0.05,0.1") == 0
    at = Evaluation.at

    def interrupted(self, eps):
        if eps == 0.05 and len(self.all) > 1:  # the last, for a random model; not of the trial on one image
            raise KeyboardInterrupt
        at(self, eps)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluation, "at", interrupted)
        assert attack(data, out, "--eps", "0.05,0.1") == 130
    assert "--resume" in capsys.readouterr().err
    assert not json.loads((out / "result.json").read_text())["complete"]
    assert run(["attack", "--config", str(out / "result.json"), "--resume"]) == 0
    a, b = (json.loads((d / "result.json").read_text()) for d in (whole, out))
    assert a["accuracy"] == b["accuracy"]
    assert b["complete"]
    assert run(["attack", "--config", str(out / "result.json"), "--resume", "--draws", "3"]) == 2


def test_train_makes_a_model_that_attack_takes(tmp_path, capsys):
    x = torch.rand(300, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0, :4].mean((1, 2)) > x[:, 0, 4:].mean((1, 2))).long()
    np.savez(tmp_path / "train.npz", images=x.numpy(), labels=y.numpy())
    out = tmp_path / "model"
    options = ["--data", str(tmp_path / "train.npz"), "--out", str(out), "--iterations", "4", "--width", "2"]
    assert run(["train", *options, "--sgld-steps", "2", "--batch-size", "16"]) == 0
    assert "validation accuracy" in capsys.readouterr().out.replace("_", " ")
    assert (
        attack(tmp_path / "train.npz", tmp_path / "out", "--model", str(out / "model.safetensors"), "--eps", "0.1") == 0
    )
    assert run(["train", "--data", str(tmp_path / "none"), "--out", str(out)]) == 2


def test_divergence_is_exit_1(tmp_path, capsys):
    x = np.random.default_rng(0).uniform(size=(200, 1, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "train.npz", images=x, labels=np.arange(200) % 2)
    options = [
        "--data",
        str(tmp_path / "train.npz"),
        "--out",
        str(tmp_path / "m"),
        "--iterations",
        "50",
        "--width",
        "2",
    ]
    wild = ["--sgld-steps", "1", "--batch-size", "8", "--learning-rate", "1e6", "--warmup", "0", "--retries", "1"]
    assert run(["train", *options, *wild]) == 1
    assert "diverged" in capsys.readouterr().err


def test_help_is_readable_and_does_not_import_torch():
    code = (
        "import sys\nfrom jem_robust.cli import run\n"
        "for c in ([], ['attack'], ['plot'], ['models'], ['train']):\n    assert run([*c, '--help']) == 0\n"
        "assert not {'torch', 'numpy', 'matplotlib', 'scipy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Example:") == 5


def test_python_m_jem_robust_is_the_command_line():
    done = subprocess.run([sys.executable, "-m", "jem_robust", "--version"], capture_output=True, text=True, check=True)
    assert "jem-robust" in done.stdout


def test_attack_arguments_belong_to_the_attack_before_them(data, tmp_path, capsys):
    options = ["--attack", "pgd", "--attack-arg", "steps=3", "--attack=pgd", "--attack-arg=loss=margin"]
    assert attack(data, tmp_path / "a", "--eps", "0.1", *options) == 0
    first = json.loads((tmp_path / "a" / "result.json").read_text())
    assert [(a["steps"], a["loss"]) for a in first["attacks"]] == [(3, "ce"), (2, "margin")]
    assert run(["attack", "--config", str(tmp_path / "a" / "result.json"), "--out", str(tmp_path / "b")]) == 0
    assert json.loads((tmp_path / "b" / "result.json").read_text())["attacks"] == first["attacks"]
    settings = {"attack": [{"pgd": {"steps": 5}}, "transfer"], "model": "tests.test_cli:tiny", "data": str(data),
                "out": str(tmp_path / "c"), "limit": 4, "eps": 0.1, "iterations": 1}  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    assert run(["attack", "--config", str(tmp_path / "run.yaml")]) == 0
    record = json.loads((tmp_path / "c" / "result.json").read_text())
    assert [a["steps"] for a in record["attacks"]] == [5, 1]
    # Attacks given by hand replace the file's, arguments included.
    assert run(["attack", "--config", str(tmp_path / "run.yaml"), "--attack", "pgd"]) == 0
    record = json.loads((tmp_path / "c" / "result.json").read_text())
    assert [a["steps"] for a in record["attacks"]] == [1]
    capsys.readouterr()
    assert attack(data, tmp_path / "d", "--attack-arg", "steps=3") == 2
    assert attack(data, tmp_path / "d", "--attack", "pgd", "--attack-arg", "stepz=3") == 2
    assert attack(data, tmp_path / "d", "--attack", "pgd", "--attack-arg", "steps") == 2
    assert "stepz" in capsys.readouterr().err
    assert attack(data, tmp_path / "d", "--attack", "pgd", "--attack-arg", "steps=3", "--attack-arg", "steps=4") == 2
    assert "expected steps once for pgd, got it twice" in capsys.readouterr().err


def noisy():
    return NoisyNet()


def one_class():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(25, 1))


def boom():
    raise KeyError("x")


def test_a_finished_run_is_repeated_elsewhere_and_never_overwritten(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert attack(data, tmp_path / "first", "--eps", "0.1") == 0
    before = (tmp_path / "first" / "result.json").read_bytes()
    assert run(["attack", "--config", str(tmp_path / "first" / "result.json"), "--limit", "3"]) == 0
    assert (tmp_path / "first" / "result.json").read_bytes() == before
    assert json.loads((tmp_path / "jem-robust-results/tiny-k2-linf/result.json").read_text())["n"] == 3


def test_a_network_with_noise_of_its_own_is_a_warning_that_strict_sees(data, tmp_path, capsys):
    assert attack(data, tmp_path / "out", "--steps", "0", "--strict", model="noisy") == 3
    captured = capsys.readouterr()
    assert "global random numbers" in captured.out
    assert "UserWarning" not in captured.err


@pytest.mark.parametrize(("model", "message"), [("one_class", "2 classes"), ("boom", "KeyError")])
def test_models_that_cannot_be_measured_leave_no_folder(data, tmp_path, capsys, model, message):
    assert attack(data, tmp_path / "out", "--steps", "0", model=model) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [("draws: 2.5", "2.5"), ("draws: [1, 2]", "one value for draws"), ("draws: abc", "abc"), ("config: x", "config")],
)
def test_yaml_of_the_wrong_type_is_refused(data, tmp_path, capsys, text, message):
    (tmp_path / "run.yaml").write_text(text)
    assert attack(data, tmp_path / "out", "--config", str(tmp_path / "run.yaml")) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "attack: pgd\r\neps: 0.1\r\n"])
def test_yaml_may_be_empty_and_name_one_attack(data, tmp_path, text):
    (tmp_path / "run.yaml").write_text(text)
    assert attack(data, tmp_path / "out", "--config", str(tmp_path / "run.yaml")) == 0


def test_a_narrow_terminal_loses_no_column(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert attack(data, tmp_path / "out", "--eps", "0.1") == 0
    printed = capsys.readouterr().out
    assert "eps (linf)" in printed
    assert "images broken by" in printed


def test_training_on_the_embedded_test_images_is_refused(tmp_path, capsys):
    assert run(["train", "--data", "fashion-mnist", "--out", str(tmp_path / "m")]) == 2
    assert "test images" in capsys.readouterr().err


def test_l0_attacks_pointwise_by_default(data, tmp_path, capsys):
    options = ["--norm", "l0", "--steps", "0", "--eps", "5", "--max-queries", "60"]
    assert attack(data, tmp_path / "out", *options, iterations=()) == 0
    assert "pointwise" in capsys.readouterr().out


FGSM = ("--attack", "torchattacks:FGSM", "--eps", "0.1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([*FGSM, "--iterations", "3"], "got --iterations: after --attack torchattacks:FGSM pass --attack-arg eot=..."),
        ([*FGSM, "--eot", "2", "--loss", "margin"], "--eot, --loss"),
        (
            ["--attack", "torchattacks:PGD", "--eps", "0.1", "--keep", "2"],
            "--attack-arg alpha=..., steps=..., random_start",
        ),
        (["--attack", "pgd", "--max-queries", "50"], "--max-queries"),
        (["--attack", "square", "--iterations", "3"], "--attack-arg"),
    ],
)
def test_options_no_attack_of_the_run_takes_are_refused(data, tmp_path, capsys, options, message):
    if "torchattacks" in str(options):
        pytest.importorskip("torchattacks", reason="a toolkit that is not installed")
    assert attack(data, tmp_path / "out", *options, iterations=()) == 2
    error = capsys.readouterr().err
    assert message in " ".join(error.split())
    assert "--attack-arg" in error
    assert not (tmp_path / "out").exists()


def test_defaults_of_presets_and_options_one_attack_takes_are_silent(data, tmp_path, capsys):
    pytest.importorskip("torchattacks", reason="a toolkit that is not installed")
    assert attack(data, tmp_path / "a", *FGSM, "--preset", "standard", iterations=()) == 0
    assert run(["attack", "--config", str(tmp_path / "a" / "result.json"), "--out", str(tmp_path / "b")]) == 0
    assert attack(data, tmp_path / "c", *FGSM, "--attack", "pgd") == 0
    (tmp_path / "run.yaml").write_text("iterations: 3")
    config = ["--config", str(tmp_path / "run.yaml")]
    assert attack(data, tmp_path / "d", *config, *FGSM, iterations=()) == 2
    assert "--iterations" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("art:ProjectedGradientDescent", ["max_iter=abc"]), ("art:ProjectedGradientDescent", ["max_iter=-3"]),
        ("foolbox:LinfPGD", ["steps=2.5"]), ("foolbox:LinfPGD", ["steps=0"]), ("torchattacks:PGD", ["steps=-1"]),
        ("art:ProjectedGradientDescent", ["random_eps=maybe"]), ("torchattacks:VANILA", []), ("foolbox:GenAttack", []),
        ("foolbox:DatasetAttack", []), ("art:AdversarialPatchNumpy", []), ("torchattacks:APGD", ["loss=foo"]),
    ],
)  # fmt: skip
def test_bad_arguments_of_toolkit_attacks_are_exit_2(data, tmp_path, capsys, name, arguments):
    pytest.importorskip(name.partition(":")[0], reason="a toolkit that is not installed")
    options = [word for argument in arguments for word in ("--attack-arg", argument)]
    assert attack(data, tmp_path / "out", "--eps", "0.1", "--attack", name, *options, iterations=()) == 2
    error = capsys.readouterr().err
    assert name in error
    assert "see its documentation" not in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text",
    [
        "attack: pgd\nattack_arg: steps=5",
        "attack: [pgd]\nattack-arg: [steps=5]",
        "attack: [{pgd: {steps: 5}}]",
        "attack: {pgd: {steps: 5}}",
    ],
)
def test_yaml_gives_an_attack_its_arguments(data, tmp_path, text):
    (tmp_path / "run.yaml").write_text(text)
    assert attack(data, tmp_path / "out", "--eps", "0.1", "--config", str(tmp_path / "run.yaml")) == 0
    assert [a["steps"] for a in json.loads((tmp_path / "out" / "result.json").read_text())["attacks"]] == [5]


@pytest.mark.parametrize(
    "text",
    [
        "attack: [{name: pgd, arguments: {steps: 5}}]", "attack: [pgd: 5]", "attack: {pgd: {}, rays: {}}",
        "attack: [pgd, transfer]\nattack_arg: steps=5", "attack_arg: steps=5", "attack: pgd\nattack_arg: {steps: 5}",
        "attack: [[pgd]]", "attack: pgd\nattack_arg: steps",
    ],
)  # fmt: skip
def test_yaml_that_gives_arguments_otherwise_is_told_the_form(data, tmp_path, capsys, text):
    (tmp_path / "run.yaml").write_text(text)
    assert attack(data, tmp_path / "out", "--config", str(tmp_path / "run.yaml")) == 2
    error = capsys.readouterr().err
    assert "NAME: {KEY: VALUE}" in " ".join(error.split())
    assert text.replace("attack: pgd\n", "").partition(":")[0] in error


def test_black_box_results_say_so_and_bf16_wants_a_float32_network(data, tmp_path, capsys):
    queries = ["--attack", "rays", "--max-queries", "20"]
    assert attack(data, tmp_path / "a", *queries, iterations=()) == 0
    assert "black box" in capsys.readouterr().out
    assert attack(data, tmp_path / "b") == 0
    assert "black box" not in capsys.readouterr().out
    assert attack(data, tmp_path / "c", "--precision", "bf16") == 2
    assert "float32 network" in capsys.readouterr().err
