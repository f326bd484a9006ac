"""Matrix products with weights, laid out once for the processor where that is possible.

Shapes: n = rows, in and out = the channels of a weight.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from python_backend.decoder.memory import zeros

Linear = Callable[[torch.Tensor], torch.Tensor]  # (n, in) to (n, out)
MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], Linear]  # of a weight (out, in) and a bias (out,)

SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}  # of the functions in decoder.cpp
PANEL_OUTPUTS = 32  # as in products.h
GROUP_BYTES = 4
INT8_LARGEST = 127


def call_native(function: Callable[..., None], *arguments: torch.Tensor | float | None) -> None:
    """Calls a function of decoder.cpp; it gets the addresses of tensors, which it reads without strides."""
    tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    assert all(tensor.is_contiguous() for tensor in tensors), "an operator reads past strides"
    function(*(each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments))


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """Torch's product; any device and dtype."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return functional.linear(inputs, self.weight, self.bias)


class NativeLinear:
    """The product of `products.h`: at memory speed for few rows, and the same for a row whatever stands beside it."""

    def __init__(self, library: ctypes.CDLL, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = pack(library, weight)
        self._bias = bias
        self.num_outputs, self.num_inputs = weight.shape
        self._product = getattr(library, f"product_{SUFFIXES[weight.dtype]}")

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        out = inputs.new_empty(len(inputs), self.num_outputs)
        sizes = (len(inputs), self.num_inputs, self.num_outputs)
        call_native(self._product, inputs, self._packed, self._bias, *sizes, out)
        return out

    def addresses(self) -> tuple[int | None, ...]:
        """Of the weights, the bias, and what int8 has beside them."""
        return self._packed.data_ptr(), _address(self._bias), None, None


class Int8Linear:
    """The product with weights of eight bits, a scale for each output; inputs are rounded so too, one scale a row."""

    def __init__(self, library: ctypes.CDLL, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        wide = weight.float()
        self._steps = (wide.abs().amax(1) / INT8_LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
        rounded = (wide / self._steps[:, None]).round().to(torch.int8)
        self._totals = rounded.sum(1, dtype=torch.int32)
        self._packed = pack(library, rounded)
        self._bias = bias
        self.num_outputs, self.num_inputs = weight.shape
        self._product = getattr(library, f"product_int8_{SUFFIXES[weight.dtype]}")

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        out = inputs.new_empty(len(inputs), self.num_outputs)
        sizes = (len(inputs), self.num_inputs, self.num_outputs)
        call_native(self._product, inputs, self._packed, self._steps, self._totals, self._bias, *sizes, out)
        return out

    def addresses(self) -> tuple[int | None, ...]:
        """Of the weights, the bias, the value of a step and the sum of each output's weights."""
        return self._packed.data_ptr(), _address(self._bias), self._steps.data_ptr(), self._totals.data_ptr()


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def pack(library: ctypes.CDLL, weight: torch.Tensor) -> torch.Tensor:
    """A weight (out, in) in the panels that `products.h` reads, as bytes."""
    num_outputs, num_inputs = weight.shape
    row_bytes = num_inputs * weight.dtype.itemsize
    num_panels = -(-num_outputs // PANEL_OUTPUTS)
    packed = zeros((num_panels * PANEL_OUTPUTS * row_bytes,), torch.uint8, weight.device)
    call_native(library.pack, weight.contiguous(), num_outputs, row_bytes // GROUP_BYTES, packed)
    return packed
