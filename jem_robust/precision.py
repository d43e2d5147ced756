"""Which number formats a device computes in."""

import torch

UNITS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")  # of x86 and of ARM


def has_bf16(device: torch.device | str) -> bool:
    """Whether a device computes in bfloat16, rather than imitating it several times slower than float32.

    What cannot be asked (other devices, torch before 2.10) is taken to.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    units = getattr(torch.cpu, "get_capabilities", None)
    return kind != "cpu" or units is None or any(bool(units().get(name)) for name in UNITS)
