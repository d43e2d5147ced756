"""Layers whose graphs hold only what derivatives in images need: the same values and derivatives, less memory.

With frozen parameters a convolution's derivative needs no input, and that of ReLU or LeakyReLU is constant between
kinks: no second derivative is to be propagated, and a bit for each value says where it is. SiLU gets a fused second
derivative. So chains of piecewise linear networks take less time, and where memory is short a whole chain still fits
without recomputation. Inside `Lean()` these layers stand in for PyTorch's own in any network; others stay as they are.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

Map = Callable[[Tensor], Tensor]
GATHER = 0x0102040810204080  # multiplied with eight bytes of 0 or 1, puts a bit of each into the highest byte
SPREAD = 0x0101010101010101  # multiplied with a byte, puts it into all eight
ORDER = 0x8040201008040201 - 2**64  # the bit of each byte that it stands for
CHUNK = 2**26  # bytes; above what malloc would fit between short-lived tensors, where they would fragment its heap


class Arena:
    """Memory for what outlives a step: slices of chunks of which only what is written takes room."""

    def __init__(self) -> None:
        self._chunk = np.empty(0, np.uint8)

    def kept(self, x: Tensor) -> Tensor:
        """A copy of x (n,) uint8 with a longer life; x itself on devices with an allocator of their own."""
        if x.device.type != "cpu":
            return x
        if len(x) > len(self._chunk):
            self._chunk = np.empty(max(CHUNK, len(x)), np.uint8)
        place, self._chunk = self._chunk[: len(x)], self._chunk[len(x) :]
        return torch.from_numpy(place).copy_(x)  # of numpy's memory, since autograd watches torch's as one piece


def packed(mask: Tensor) -> Tensor:
    """Bits of a bool tensor in the order of its memory, eight a byte: uint8 (ceil(numel / 8),)."""
    flat = _dense(mask).reshape(-1)
    flat = F.pad(flat, (0, -len(flat) % 8))
    return ((flat.view(torch.int64) * GATHER) >> 56).to(torch.uint8)


def unpacked(bits: Tensor, like: Tensor) -> Tensor:
    """The bool tensor again, in shape and memory format of `like`."""
    dense = _dense(like)
    mask = (bits.to(torch.int64) * SPREAD).bitwise_and_(ORDER).view(torch.uint8).ne(0)
    mask = mask[: like.numel()].view(dense.shape)
    return mask if dense is like else mask.permute(0, 3, 1, 2)


def _dense(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1) if _channels_last(x) else x


def _channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


class _Affine(torch.autograd.Function):
    """value(x) with the linear part `forward` of adjoint `adjoint`, which keep what they need themselves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Map, forward: Map, adjoint: Map) -> Tensor:
        ctx.maps = adjoint, adjoint, forward
        return value(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Affine.apply(grads[0], *ctx.maps), None, None, None  # type: ignore[no-untyped-call]


class _Rectified(torch.autograd.Function):
    """arena: where bits are kept; None to keep the output, which costs 4 bytes a value and no time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float, arena: Arena | None) -> Tensor:
        y = F.leaky_relu(x, slope) if slope else F.relu(x)
        ctx.settings = slope, None if arena is None else torch.empty_like(y, device="meta")
        # PyTorch lets NaN pass in the one and not in the other.
        ctx.save_for_backward(y if arena is None else arena.kept(packed(x > 0 if slope else ~(x <= 0))))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Masked.apply(grads[0], *ctx.saved_tensors, *ctx.settings), None, None  # type: ignore[no-untyped-call]


class _Masked(torch.autograd.Function):
    """x where a unit is open, slope * x elsewhere: linear, and its own adjoint. like: None where `open_` is no bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, open_: Tensor, slope: float, like: Tensor | None) -> Tensor:
        ctx.settings = slope, like
        ctx.save_for_backward(open_)
        if like is not None:
            return torch.where(unpacked(open_, like), x, x * slope if slope else 0.0)
        if slope:
            return torch.ops.aten.leaky_relu_backward(x, open_, slope, True)  # type: ignore[no-any-return]
        return torch.ops.aten.threshold_backward(x, open_, 0)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Masked.apply(grads[0], *ctx.saved_tensors, *ctx.settings), None, None, None  # type: ignore[no-untyped-call]


class _SiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return _SiLUBackward.apply(grads[0], *ctx.saved_tensors)  # type: ignore[no-any-return, no-untyped-call]


class _SiLUBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(grad, x)
        return torch.ops.aten.silu_backward(grad, x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        grad, x = ctx.saved_tensors
        s = torch.sigmoid(x)
        c = 1 - s
        # (x s)'' = s (1 - s) (2 + x (1 - 2 s))
        second = (c - s).mul_(x).add_(2).mul_(s).mul_(c)
        return torch.ops.aten.silu_backward(grads[0], x), second.mul_(grad).mul_(grads[0])


class Lean(TorchFunctionMode):
    """Inside, graphs of frozen networks keep less. Derivatives of first and second order, in images only.

    compact: ReLU and LeakyReLU keep bits, at the price of packing and unpacking them, instead of their outputs.
    """

    def __init__(self, compact: bool = False) -> None:
        super().__init__()
        self._arena = Arena() if compact else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        stand_in = _STAND_INS.get(func)
        if stand_in is not None and args and isinstance(args[0], Tensor) and args[0].requires_grad:
            result = stand_in(self._arena, *args, **kwargs)
            if result is not None:
                return result
        return func(*args, **kwargs)


def _leaky_relu(arena: Arena | None, x: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    return None if inplace or negative_slope < 0 else _Rectified.apply(x, negative_slope, arena)  # type: ignore[no-untyped-call]


def _relu(arena: Arena | None, x: Tensor, inplace: bool = False) -> Any:
    return _leaky_relu(arena, x, 0.0, inplace)


def _silu(arena: Arena | None, x: Tensor, inplace: bool = False) -> Any:
    return None if inplace else _SiLU.apply(x)  # type: ignore[no-untyped-call]


def _conv2d(
    arena: Arena | None, x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Any:  # fmt: skip
    if weight.requires_grad or (bias is not None and bias.requires_grad) or isinstance(padding, str) or x.dim() != 4:
        return None
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:  # as autocast itself
        kind = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(kind), weight.to(kind), None if bias is None else bias.to(kind)
    if _channels_last(x):  # else the kernels reorder the weight at every call
        weight = weight.contiguous(memory_format=torch.channels_last)
    how = (_pair(stride), _pair(padding), _pair(dilation), False, [0, 0], groups)
    shape, layout = x.shape, torch.channels_last if _channels_last(x) else torch.contiguous_format

    def adjoint(grad: Tensor) -> Tensor:
        like = torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=layout)  # only its shape counts
        backward = torch.ops.aten.convolution_backward
        return backward(grad, like, weight, None, *how, [True, False, False])[0]  # type: ignore[no-any-return]

    return _Affine.apply(  # type: ignore[no-untyped-call]
        x,
        lambda v: torch.convolution(v, weight, bias, *how),
        lambda v: torch.convolution(v, weight, None, *how),
        adjoint,
    )


def _avg_pool2d(arena: Arena | None, x: Tensor, kernel_size: Any, stride: Any = None, *rest: Any, **more: Any) -> Any:
    if rest or more or x.dim() != 4:
        return None
    size, step, shape = _pair(kernel_size), _pair(stride or kernel_size), x.shape

    def adjoint(grad: Tensor) -> Tensor:
        like = torch.empty(shape, dtype=grad.dtype, device=grad.device)
        backward = torch.ops.aten.avg_pool2d_backward
        return backward(grad, like, size, step, [0, 0], False, True, None)  # type: ignore[no-any-return]

    pool: Map = lambda v: F.avg_pool2d(v, kernel_size, stride)  # noqa: E731
    return _Affine.apply(x, pool, pool, adjoint)  # type: ignore[no-untyped-call]


def _pair(value: Any) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


_STAND_INS: dict[Any, Callable[..., Any]] = {
    F.conv2d: _conv2d, F.relu: _relu, torch.relu: _relu, F.leaky_relu: _leaky_relu, F.silu: _silu,
    F.avg_pool2d: _avg_pool2d,
}  # fmt: skip
