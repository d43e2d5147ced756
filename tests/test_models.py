import pytest
import torch

import jem_robust as jr
from jem_robust.checkpoints import save_checkpoint
from jem_robust.networks import build_network
from tests.worlds import quick, smooth_cnn


def made_classifier():
    return jr.JEMClassifier(smooth_cnn(), quick())


def made_network():
    return smooth_cnn()


def made_nothing():
    return 3


@pytest.fixture
def checkpoint(tmp_path):
    network = build_network("small-resnet", width=2, num_classes=3)
    refinement = {"steps": 7, "step_size": 0.5, "noise": 0.02, "init_noise": 0.0, "chains": 4, "clamp": True}
    card = {
        "architecture": {"name": "small-resnet", "width": 2, "num_classes": 3, "channels": 1}, "input_range": [0, 1],
        "input_shape": [1, 8, 8], "num_classes": 3, "refinement": refinement,
    }  # fmt: skip
    save_checkpoint(tmp_path / "m.safetensors", network, card)
    return tmp_path / "m.safetensors", network


def test_a_card_fills_in_the_refinement_and_what_is_known_of_the_input(checkpoint):
    path, network = checkpoint
    model = jr.load_model(path)
    assert model.refinement == jr.Refinement(7, 0.5, 0.02, 0.0, 4, True)
    assert (model.input_range, model.input_shape, model.num_classes) == ((0, 1), (1, 8, 8), 3)
    ten = jr.load_model(str(path), steps=10, gradient="straight-through", seed=5, device="cpu")
    assert ten.refinement == jr.Refinement(10, 0.5, 0.02, 0.0, 4, True)
    assert (ten.gradient, ten.seed) == ("straight-through", 5)
    plain = jr.load_model(path, steps=0)
    x = torch.rand(2, 1, 8, 8)
    torch.testing.assert_close(plain(x), network.eval()(x))
    with pytest.raises(ValueError, match="shape"):
        model(torch.rand(2, 3, 8, 8))


def test_without_a_card_the_refinement_is_the_default(tmp_path):
    from jem_robust.networks.wide_resnet import WideResNet

    torch.save(WideResNet(depth=10, width=1).state_dict(), tmp_path / "old.pt")
    model = jr.load_model(tmp_path / "old.pt", steps=3)
    assert model.refinement == jr.Refinement(steps=3)
    assert model.input_range == (-1, 1)


def test_factories_may_make_a_network_or_a_classifier():
    assert jr.load_model("tests.test_models:made_classifier").refinement == quick()
    assert jr.load_model("tests.test_models:made_classifier", steps=1).refinement == quick(steps=1)
    assert jr.load_model("tests.test_models:made_network", steps=2).refinement == jr.Refinement(steps=2)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("no-such-model", "jem-fashion-mnist"),
        ("no.such.module:x", "importable"),
        ("tests.test_models:nope", "importable"),
    ],
)
def test_unknown_sources_are_refused(source, message):
    with pytest.raises(ValueError, match=message):
        jr.load_model(source)


def test_keywords_of_the_refinement_are_taken_and_others_refused(checkpoint):
    assert jr.load_model(checkpoint[0], chains=2).refinement.chains == 2
    assert jr.load_model("tests.test_models:made_classifier", steps=1, noise=0.5).refinement.noise == 0.5
    for source in (checkpoint[0], "tests.test_models:made_classifier"):
        with pytest.raises(TypeError, match="stepps"):
            jr.load_model(source, stepps=2)


def test_chains_put_aside_by_a_plain_view_come_back(checkpoint):
    plain = jr.load_model(checkpoint[0]).with_refinement(steps=0)
    assert plain.refinement.chains == 1
    assert plain.with_refinement(steps=3).refinement.chains == 4
    assert plain.with_refinement(steps=3, chains=2).refinement.chains == 2


def test_other_mistakes_are_refused(checkpoint):
    with pytest.raises(TypeError, match="network or JEMClassifier"):
        jr.load_model("tests.test_models:made_nothing")
    with pytest.raises(ValueError, match="gradient"):
        jr.load_model(checkpoint[0], gradient="transfer")
    with pytest.raises(ValueError, match="device"):
        jr.load_model(checkpoint[0], device="warp-drive")
    with pytest.raises(ValueError, match="steps"):
        jr.load_model(checkpoint[0], steps=-1)
