"""What computes a model on the device at hand: compiled for the processor, or torch's."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from python_backend.decoder.fused import FusedLayers, can_fuse
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

if TYPE_CHECKING:
    from python_backend.decoder.model import Layer

logger = logging.getLogger(__name__)


class KernelsMissing(RuntimeError):
    """The options ask for arithmetic that cannot be had here."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """A model's operators, and how its matrix products are made."""

    operators: Operators
    make_linear: MakeLinear  # in the layers
    make_head: MakeLinear  # the output head, which stays in the model's dtype
    library: ctypes.CDLL | None = None  # None: torch's
    config: DecoderConfig | None = None

    def fuse(self, layers: Sequence[Layer], norm: torch.Tensor) -> FusedLayers | None:
        """The layers as one, for steps of decodes alone; None where they must be run one operator at a time."""
        if self.library is None or self.config is None or not isinstance(self.operators, NativeOperators):
            return None
        return FusedLayers(self.library, self.config, self.operators, layers, norm) if can_fuse(layers) else None


def choose_kernels(config: DecoderConfig, num_positions: int, options: EngineOptions) -> Kernels:
    """The compiled kernels where they are wanted and can be had, else torch's.

    Raises:
        KernelsMissing: int8 weights are wanted, which only the compiled ones compute.
    """
    device, dtype = torch.device(options.device), options.torch_dtype
    if device.type == "cuda" and options.weights != "int8":
        return Kernels(_gpu_operators(config, num_positions, device), PlainLinear, PlainLinear)
    library = load_library() if options.compile and device.type == "cpu" and dtype in SUFFIXES else None
    if library is None:
        if options.weights == "int8":
            raise KernelsMissing("weights 'int8' need a CPU, compile = true and a C++ compiler; see the log")
        return Kernels(TorchOperators(config, num_positions, device), PlainLinear, PlainLinear)
    operators: Operators = TorchOperators(config, num_positions, device)
    if can_run(config, dtype):
        operators = NativeOperators(library, config, num_positions, dtype)
    make_head = _maker(library, NativeLinear)
    make_linear = _maker(library, Int8Linear) if options.weights == "int8" else make_head
    return Kernels(operators, make_linear, make_head, library, config)


def _gpu_operators(config: DecoderConfig, num_positions: int, device: torch.device) -> Operators:
    """Triton's kernels, or torch's own where the compiler is missing, which read the cache through a copy."""
    try:
        from python_backend.decoder.gpu_kernels import GpuOperators
    except ImportError as error:
        logger.warning("no Triton compiler (%s): decode steps on %s are slow and without graphs", error, device)
        return TorchOperators(config, num_positions, device)
    return GpuOperators(config, num_positions, device)


def _maker(library: ctypes.CDLL, kind: type[NativeLinear] | type[Int8Linear]) -> MakeLinear:
    def make(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        item_bytes = 1 if kind is Int8Linear else weight.dtype.itemsize
        if weight.shape[1] * item_bytes % GROUP_BYTES:
            return PlainLinear(weight, bias)
        return kind(library, weight, bias)

    return make
