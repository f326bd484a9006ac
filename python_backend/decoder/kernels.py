"""What computes a model on the device at hand: compiled for the processor, or torch's."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from python_backend.decoder.linear import (
    GROUP_BYTES,
    SUFFIXES,
    Int8Linear,
    Linear,
    MakeLinear,
    NativeLinear,
    PlainLinear,
)
from python_backend.decoder.native import NativeOperators, can_run, load_library
from python_backend.decoder.operators import Operators, TorchOperators
from python_backend.decoder.options import EngineOptions
from python_backend.weights import DecoderConfig


class KernelsMissing(RuntimeError):
    """The options ask for arithmetic that cannot be had here."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """A model's operators, and how its matrix products are made."""

    operators: Operators
    make_linear: MakeLinear  # in the layers
    make_head: MakeLinear  # the output head, which stays in the model's dtype


def choose_kernels(config: DecoderConfig, num_positions: int, options: EngineOptions) -> Kernels:
    """The compiled kernels where they are wanted and can be had, else torch's.

    Raises:
        KernelsMissing: int8 weights are wanted, which only the compiled ones compute.
    """
    device, dtype = torch.device(options.device), options.torch_dtype
    library = load_library() if options.compile and device.type == "cpu" and dtype in SUFFIXES else None
    if library is None:
        if options.weights == "int8":
            raise KernelsMissing("weights 'int8' need a CPU, compile = true and a C++ compiler; see the log")
        return Kernels(TorchOperators(config, num_positions, device), PlainLinear, PlainLinear)
    operators: Operators = TorchOperators(config, num_positions, device)
    if can_run(config, dtype):
        operators = NativeOperators(library, config, num_positions, dtype)
    make_head = _maker(library, NativeLinear)
    return Kernels(operators, _maker(library, Int8Linear) if options.weights == "int8" else make_head, make_head)


def _maker(library: ctypes.CDLL, kind: type[NativeLinear] | type[Int8Linear]) -> MakeLinear:
    def make(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        item_bytes = 1 if kind is Int8Linear else weight.dtype.itemsize
        if weight.shape[1] * item_bytes % GROUP_BYTES:
            return PlainLinear(weight, bias)
        return kind(library, weight, bias)

    return make
