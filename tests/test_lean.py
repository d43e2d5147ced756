"""Lean layers against PyTorch's own: values, first and second derivatives, and what their graphs keep."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from jem_robust.lean import CHUNK, Arena, Lean, packed, unpacked
from jem_robust.networks import build_network


class Layers(nn.Module):
    """Everything there are stand-ins for, called in all the ways networks do, and things there are none for."""

    def __init__(self, activation):
        super().__init__()
        self.convs = nn.ModuleList(
            [
                nn.Conv2d(2, 6, 3, stride=2, padding=1),
                nn.Conv2d(6, 6, 3, padding=2, dilation=2, groups=3, bias=False),
                nn.Conv2d(6, 4, (1, 3), padding="same"),
                nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
            ]
        )
        self.activation, self.head = activation, nn.Linear(4, 3)

    def forward(self, x):
        for conv in self.convs:
            x = self.activation(conv(x))
        x = F.avg_pool2d(x, 2)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


ACTIVATIONS = {
    "relu": F.relu, "torch.relu": torch.relu, "ReLU": nn.ReLU(), "ReLU in place": nn.ReLU(inplace=True),
    "negative slope": nn.LeakyReLU(-0.5), "leaky": lambda x: F.leaky_relu(x, 0.2), "LeakyReLU": nn.LeakyReLU(0.1),
    "leaky in place": nn.LeakyReLU(inplace=True), "silu": F.silu, "SiLU": nn.SiLU(), "softplus": F.softplus,
    "by name": lambda x: F.leaky_relu(input=x, negative_slope=0.3), "method": lambda x: x.relu(),
}  # fmt: skip


COMPACT = pytest.mark.parametrize("compact", [False, True])


def derivatives(network, x, context):
    """Logits, grad of a nonlinear function of them, and a Hessian product of it."""
    leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
    with context:
        logits = network(leaf.clone(memory_format=torch.preserve_format))
        value = logits.logsumexp(1).sum()
        gradient = torch.autograd.grad(value, leaf, create_graph=True)[0]
    direction = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)
    return logits.detach(), gradient.detach(), torch.autograd.grad(gradient, leaf, direction)[0]


def frozen(network):
    return network.double().requires_grad_(False).eval()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", ACTIVATIONS)
@COMPACT
def test_same_values_and_derivatives(name, layout, compact):
    torch.manual_seed(0)
    network = frozen(Layers(ACTIVATIONS[name])).to(memory_format=layout)
    x = torch.randn(3, 2, 9, 7, dtype=torch.float64).contiguous(memory_format=layout)
    for ours, plain in zip(
        derivatives(network, x, Lean(compact)), derivatives(network, x, torch.enable_grad()), strict=True
    ):
        torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("architecture", ["small-resnet", "wide-resnet"])
@COMPACT
def test_same_in_our_networks(architecture, compact):
    torch.manual_seed(0)
    network = frozen(
        build_network(architecture, channels=3, **({"depth": 10, "width": 1} if "wide" in architecture else {}))
    )
    x = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    for ours, plain in zip(
        derivatives(network, x, Lean(compact)), derivatives(network, x, torch.enable_grad()), strict=True
    ):
        torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("function", [F.silu, F.relu, lambda x: F.leaky_relu(x, 0.2)])
@COMPACT
def test_finite_differences(function, compact):
    x = torch.tensor([-2.0, -0.7, 0.4, 3.0], dtype=torch.float64, requires_grad=True)

    def lean(x):
        with Lean(compact):
            return function(x)

    assert torch.autograd.gradcheck(lean, x)
    assert torch.autograd.gradgradcheck(lean, x)


@COMPACT
def test_kinks_and_infinities_are_as_in_torch(compact):
    values = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    for function in (F.relu, F.leaky_relu):
        gradients = []
        for context in (Lean(compact), torch.enable_grad()):
            leaf = values.clone().requires_grad_()
            with context:
                y = function(leaf)
            gradients.append((y.detach(), torch.autograd.grad(y.sum(), leaf)[0]))
        torch.testing.assert_close(*gradients, equal_nan=True)


def test_left_alone_where_parameters_learn_and_outside():
    conv, x = nn.Conv2d(1, 1, 3), torch.rand(1, 1, 5, 5, requires_grad=True)
    with Lean():
        conv(x).sum().backward()
        assert "Affine" not in type(conv(x).grad_fn).__name__
    assert conv.weight.grad is not None
    conv.requires_grad_(False)
    with Lean():
        assert "Affine" in type(conv(x).grad_fn).__name__
        assert conv(x.detach()).grad_fn is None
    assert "Affine" not in type(conv(x).grad_fn).__name__


@pytest.mark.parametrize("shape", [(), (1,), (13,), (2, 3), (2, 3, 4, 5), (0, 2)])
def test_bits_come_back(shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) > 0.5
    assert packed(mask).numel() == -(-mask.numel() // 8)
    assert torch.equal(unpacked(packed(mask), mask), mask)
    if len(shape) == 4:
        last = mask.contiguous(memory_format=torch.channels_last)
        back = unpacked(packed(last), last)
        assert torch.equal(back, mask)
        assert back.stride() == last.stride()


def test_arena_slices_are_their_own():
    arena = Arena()
    parts = [torch.full((CHUNK // 3 + 1,), i, dtype=torch.uint8) for i in range(4)]
    kept = [arena.kept(part) for part in parts]
    kept.append(arena.kept(torch.full((CHUNK + 5,), 9, dtype=torch.uint8)))
    assert [int(k.unique()) for k in kept] == [0, 1, 2, 3, 9]
    assert kept[-1].numel() == CHUNK + 5


def test_bfloat16_gradients_are_about_right():
    torch.manual_seed(0)
    network = build_network("small-resnet").requires_grad_(False).eval()
    x = torch.rand(4, 1, 28, 28)
    plain = derivatives(network, x, torch.enable_grad())
    with torch.autocast("cpu", torch.bfloat16):
        ours = derivatives(network, x, Lean())
    for a, b in zip(ours, plain, strict=True):
        assert float(F.cosine_similarity(a.float().flatten(), b.flatten(), 0)) > 0.98


def kept_bytes(network, x, context):
    seen = {}

    def note(tensor):
        seen[tensor.data_ptr()] = tensor.nbytes
        return tensor

    leaf = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), context:
        gradient = torch.autograd.grad(network(leaf).logsumexp(1).sum(), leaf, create_graph=True)[0]
    del gradient
    return sum(seen.values()) - sum(p.nbytes for p in network.parameters() if p.data_ptr() in seen)


@pytest.mark.parametrize(
    ("architecture", "compact", "factor"),
    [("wide-resnet", True, 50), ("wide-resnet", False, 2), ("small-resnet", False, 2)],
)
def test_graphs_keep_less(architecture, compact, factor):
    settings = {"depth": 10, "width": 2} if architecture == "wide-resnet" else {"channels": 3}
    network = build_network(architecture, **settings).requires_grad_(False).eval()
    x = torch.rand(4, 3, 32, 32)
    assert kept_bytes(network, x, Lean(compact)) * factor < kept_bytes(network, x, torch.enable_grad())
