"""The type in which training multiplies matrices: half the bytes where the device has instructions for it.

A processor without such instructions emulates bfloat16 at an eighth of float32's speed.
"""

from functools import cache
from typing import Any

import torch

_BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "arm_bf16")


@cache
def product_type(device: str) -> torch.dtype:
    """Return bfloat16 on GPUs and on processors that have instructions for its products, else float32."""
    instructions = torch.cpu.get_capabilities()
    native = device != "cpu" or any(instructions.get(name, False) for name in _BF16_INSTRUCTIONS)
    return torch.bfloat16 if native else torch.float32


def in_product_type(device: str) -> Any:
    """Return a context manager in which products of matrices on `device` are made in its `product_type`."""
    return torch.autocast(device, torch.bfloat16, enabled=product_type(device) == torch.bfloat16)
