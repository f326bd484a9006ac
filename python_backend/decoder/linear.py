"""Matrix products with weights laid out once for the processor's matrix kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

Linear = Callable[[torch.Tensor], torch.Tensor]  # (n, in) to (n, out)

# oneDNN's packed kernels take longer for one or two rows than for four.
MIN_PACKED_ROWS = 4


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """Inputs (n, in) times a weight (out, in), plus a bias (out,); any device and dtype."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return functional.linear(inputs, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """The same from a weight in oneDNN's own layout, which torch would otherwise make anew at every call.

    Twice as fast for few rows; see `benchmarks/decoder_step.py`.
    """

    packed: torch.Tensor  # opaque
    bias: torch.Tensor | None = None

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self.packed, self.bias, "none", [], "")
        return result


def can_pack(weight: torch.Tensor) -> bool:
    """Whether a weight of this dtype and device has a packed layout here."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and torch._C._has_mkldnn
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """The product with `weight` (out, in), packed where that is possible; keeps no plain copy then."""
    if not can_pack(weight):
        return PlainLinear(weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), MIN_PACKED_ROWS)
    return PackedLinear(packed, bias)
