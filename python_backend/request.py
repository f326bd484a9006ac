"""What a client asks for: the request and its sampling parameters, parsed once at the edge.

Names and defaults follow Triton's vLLM backend (`sampling_parameters` is a JSON object whose values may be
numbers or numeric strings), except that generation is greedy unless a temperature is given, as it is in
`transformers` for the LLaVA checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from python_backend.errors import InvalidSampling

MAX_STOP_STRINGS = 16
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How the next token is chosen and when generation ends.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 keep every token. `logprobs` is the number of top
    alternatives reported beside each chosen token; None reports nothing. `seed` None draws a fresh one.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None

    def to_json(self) -> str:
        """One JSON object, read back by `parse_sampling`."""
        return json.dumps(asdict(self), separators=(",", ":"))


# Other names under which clients send the same parameter.
_ALIASES = {"max_completion_tokens": "max_tokens", "max_new_tokens": "max_tokens", "stop_words": "stop"}

# Accepted and ignored at this one value, since clients send them as a matter of course.
_FIXED = {"n": 1, "best_of": 1, "stream": None}

# name: (lowest, highest), both allowed
_RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "temperature": (0.0, 100.0),
    "top_k": (-1, 2**31 - 1),
    "top_p": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "seed": (-(2**63), 2**64 - 1),
    "logprobs": (0, MAX_TOP_LOGPROBS),
}

_INTEGERS = {"max_tokens", "min_tokens", "top_k", "seed", "logprobs"}
_FLAGS = {"ignore_eos", "skip_special_tokens", "include_stop_str_in_output"}
_OPTIONAL = {"seed", "logprobs"}
NAMES = frozenset(field.name for field in fields(SamplingParameters)) | frozenset(_ALIASES) | frozenset(_FIXED)


def parse_sampling(text: str) -> SamplingParameters:
    """The parameters in a JSON object.

    Raises:
        InvalidSampling: not JSON, not an object, an unknown name, a wrong type or a value out of range.
    """
    try:
        values = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:  # the latter for a thousand brackets
        raise InvalidSampling(f"sampling_parameters is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise InvalidSampling(f"sampling_parameters must be a JSON object, not {_kind(values)}")
    return sampling_from(values)


def sampling_from(values: Mapping[str, Any]) -> SamplingParameters:
    """The parameters in a mapping of names to numbers, strings, lists or flags; see `parse_sampling`."""
    known: dict[str, Any] = {}
    for given, value in values.items():
        name = _ALIASES.get(given, given)
        if name in _FIXED:
            _check_fixed(name, value)
        elif name not in NAMES:
            allowed = ", ".join(sorted(NAMES - frozenset(_FIXED)))
            raise InvalidSampling(f"unknown sampling parameter {given!r}; allowed: {allowed}")
        elif name in known:
            raise InvalidSampling(f"sampling parameter {name!r} is given twice (also as {given!r})")
        elif value is not None or name in _OPTIONAL:
            known[name] = _parse_value(name, value)
    if known.get("top_k") == -1:  # vLLM's word for "all"
        known["top_k"] = 0
    parameters = SamplingParameters(**known)
    if parameters.min_tokens > parameters.max_tokens:
        raise InvalidSampling(f"min_tokens {parameters.min_tokens} is above max_tokens {parameters.max_tokens}")
    return parameters


def _check_fixed(name: str, value: object) -> None:
    wanted = _FIXED[name]
    if wanted is not None and value is not None and value not in (wanted, str(wanted)):
        raise InvalidSampling(f"{name} must be {wanted}, not {value!r}")


def _parse_value(name: str, value: object) -> object:
    if value is None:
        return None
    if name in _FLAGS:
        return _flag(name, value)
    if name == "stop":
        return _stop_strings(value)
    if name == "stop_token_ids":
        return _token_ids(value)
    number = _integer(name, value) if name in _INTEGERS else _real(name, value)
    lowest, highest = _RANGES[name]
    if not lowest <= number <= highest:
        raise InvalidSampling(f"{name} must be between {lowest} and {highest}, not {value!r}")
    return number


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise InvalidSampling(f"{name} must be a whole number, not {_kind(value)}")
    try:
        number = int(value) if not isinstance(value, float) or value.is_integer() else None
    except (ValueError, OverflowError):
        number = None
    if number is None:
        raise InvalidSampling(f"{name} must be a whole number, not {value!r}")
    return number


def _real(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise InvalidSampling(f"{name} must be a number, not {_kind(value)}")
    try:
        return float(value)
    except (ValueError, OverflowError) as error:
        raise InvalidSampling(f"{name} must be a number, not {value!r}") from error


def _flag(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise InvalidSampling(f"{name} must be true or false, not {value!r}")


def _stop_strings(value: object) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(item, str) for item in strings):
        raise InvalidSampling(f"stop must be a string or a list of strings, not {value!r}")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidSampling(f"stop has {len(strings)} strings; at most {MAX_STOP_STRINGS} are allowed")
    if not all(strings):
        raise InvalidSampling("stop has an empty string")
    return tuple(strings)


def _token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not all(type(item) is int and item >= 0 for item in value):
        raise InvalidSampling(f"stop_token_ids must be a list of token ids, not {value!r}")
    return tuple(value)


def _kind(value: object) -> str:
    names = {"dict": "an object", "list": "a list", "str": "a string", "bool": "a truth value", "NoneType": "null"}
    return names.get(type(value).__name__, f"a {type(value).__name__}")
