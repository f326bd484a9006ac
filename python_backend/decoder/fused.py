"""A step of decodes through all layers in one call of `decoder.cpp`: between its operators no Python runs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from python_backend.decoder.kv_cache import KeyValueCache
from python_backend.decoder.linear import SUFFIXES, Int8Linear, Linear, NativeLinear
from python_backend.decoder.native import NativeOperators
from python_backend.weights import DecoderConfig

if TYPE_CHECKING:
    from python_backend.decoder.model import DecodeGroup, Layer

_INTEGER, _REAL, _ADDRESS = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class _Weight(ctypes.Structure):
    _fields_ = (
        *((name, _ADDRESS) for name in ("packed", "bias", "steps", "totals")),
        *((name, _INTEGER) for name in ("num_inputs", "num_outputs")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _ADDRESS) for name in ("input_norm", "mlp_norm")),
        *((name, _Weight) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _ADDRESS) for name in ("keys", "values")),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, _INTEGER) for name in ("num_layers", "width", "mlp_width", "num_heads", "num_kv_heads")),
        *((name, _INTEGER) for name in ("head_width", "block_tokens")),
        *((name, _ADDRESS) for name in ("cosine", "sine")),
        *((name, _REAL) for name in ("epsilon", "scale")),
    )


class _Decodes(ctypes.Structure):
    _fields_ = (
        *((name, _INTEGER) for name in ("count", "max_blocks")),
        *((name, _ADDRESS) for name in ("positions", "blocks", "tables", "lengths")),
    )


class FusedLayers:
    """Layers whose products are all native. Holds on to what it reads; writes the cache that it is given."""

    def __init__(
        self,
        library: ctypes.CDLL,
        config: DecoderConfig,
        operators: NativeOperators,
        layers: Sequence[Layer],
        norm: torch.Tensor,
    ) -> None:
        self._config = config
        self._operators = operators
        self._layers = layers
        self._norm = norm
        self._decode = getattr(library, f"decode_{SUFFIXES[norm.dtype]}")
        self._places: tuple[KeyValueCache, ctypes.Array[_Layer], _Model] | None = None

    def decode(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        blocks: torch.Tensor,
        group: DecodeGroup,
        cache: KeyValueCache,
    ) -> torch.Tensor:
        """What layers and last norm make of one token per sequence, (b, w); `hidden` (b, w) is changed."""
        if self._places is None or self._places[0] is not cache:
            self._places = (cache, self._describe_layers(cache), self._describe_model(cache))
        _, layers, model = self._places
        assert all(each.is_contiguous() for each in (hidden, group.tables)), "reads past strides"
        out = torch.empty_like(hidden)
        addresses = (each.data_ptr() for each in (positions, blocks, group.tables, group.lengths))
        step = _Decodes(len(hidden), group.tables.shape[1], *addresses)
        arguments = (ctypes.byref(step), hidden.data_ptr(), out.data_ptr())
        self._decode(ctypes.byref(model), layers, self._norm.data_ptr(), *arguments)
        return out

    def _describe_layers(self, cache: KeyValueCache) -> ctypes.Array[_Layer]:
        return (_Layer * len(self._layers))(
            *(
                _Layer(
                    layer.input_norm.data_ptr(),
                    layer.mlp_norm.data_ptr(),
                    *(_describe(each) for each in (layer.qkv, layer.output, layer.gate_up, layer.down)),
                    cache.keys(index).data_ptr(),
                    cache.values(index).data_ptr(),
                )
                for index, layer in enumerate(self._layers)
            )
        )

    def _describe_model(self, cache: KeyValueCache) -> _Model:
        config, operators = self._config, self._operators
        return _Model(
            len(self._layers),
            config.width,
            config.mlp_width,
            config.num_heads,
            config.num_kv_heads,
            config.head_width,
            cache.block_tokens,
            operators.cosine.data_ptr(),
            operators.sine.data_ptr(),
            config.norm_epsilon,
            operators.scale,
        )


def can_fuse(layers: Sequence[Layer]) -> bool:
    """Whether all products of `layers` are native."""
    return all(
        isinstance(linear, NativeLinear | Int8Linear)
        for layer in layers
        for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
    )


def _describe(linear: Linear) -> _Weight:
    assert isinstance(linear, NativeLinear | Int8Linear)
    return _Weight(*linear.addresses(), linear.num_inputs, linear.num_outputs)
