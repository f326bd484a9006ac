"""Sampling parameters: what is accepted, what is refused, and in which words."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from python_backend.errors import InvalidSampling
from python_backend.request import MAX_STOP_STRINGS, NAMES, SamplingParameters, parse_sampling, sampling_from

BOUNDS = [
    ("max_tokens", 1, 2**31 - 1, 1),
    ("min_tokens", 0, 2**31 - 1, 1),
    ("temperature", 0.0, 100.0, 1e-3),
    ("top_k", -1, 2**31 - 1, 1),
    ("top_p", 1e-9, 1.0, 1e-3),
    ("min_p", 0.0, 1.0, 1e-3),
    ("repetition_penalty", 1e-3, 100.0, 1e-2),
    ("presence_penalty", -2.0, 2.0, 1e-3),
    ("frequency_penalty", -2.0, 2.0, 1e-3),
    ("seed", -(2**63), 2**64 - 1, 1),
    ("logprobs", 0, 20, 1),
]


@pytest.mark.parametrize(("name", "lowest", "highest", "_step"), BOUNDS)
def test_both_ends_of_a_range_are_allowed(name: str, lowest: float, highest: float, _step: float) -> None:
    for value in (lowest, highest):
        others = {"max_tokens": 2**31 - 1} if name == "min_tokens" else {}
        expected = 0 if (name, value) == ("top_k", -1) else value
        assert getattr(sampling_from({name: value, **others}), name) == expected


@pytest.mark.parametrize(("name", "lowest", "highest", "step"), BOUNDS)
def test_beyond_a_range_the_name_and_the_value_are_told(name: str, lowest: float, highest: float, step: float) -> None:
    for value in (lowest - step, highest + step):
        with pytest.raises(InvalidSampling) as refused:
            sampling_from({name: value})
        assert refused.value.text == f"{name} must be between {lowest} and {highest}, not {value!r}"


def test_nothing_given_is_greedy_with_the_documented_defaults() -> None:
    for text in ("", "  ", "{}"):
        assert parse_sampling(text) == SamplingParameters()
    assert json.loads(SamplingParameters().to_json()) == {
        "max_tokens": 256,
        "min_tokens": 0,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": None,
        "stop": [],
        "stop_token_ids": [],
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "skip_special_tokens": True,
        "logprobs": None,
    }


@pytest.mark.parametrize(
    ("given_values", "expected"),
    [
        ({"max_tokens": "20"}, {"max_tokens": 20}),
        ({"max_tokens": 20.0}, {"max_tokens": 20}),
        ({"temperature": "0.5"}, {"temperature": 0.5}),
        ({"temperature": 1}, {"temperature": 1.0}),
        ({"ignore_eos": "True"}, {"ignore_eos": True}),
        ({"skip_special_tokens": "false"}, {"skip_special_tokens": False}),
        ({"max_new_tokens": 7}, {"max_tokens": 7}),
        ({"max_completion_tokens": 7}, {"max_tokens": 7}),
        ({"stop_words": ["a"]}, {"stop": ("a",)}),
        ({"stop": "a"}, {"stop": ("a",)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"stop_token_ids": [2, 0]}, {"stop_token_ids": (2, 0)}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"seed": None, "logprobs": None}, {}),
        ({"max_tokens": None}, {}),
        ({"n": 1, "best_of": "1", "stream": True}, {}),
    ],
)
def test_the_forms_that_clients_send_are_understood(
    given_values: dict[str, object], expected: dict[str, object]
) -> None:
    assert sampling_from(given_values) == SamplingParameters(**expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"max_tokens": True}, "max_tokens must be a whole number, not a truth value"),
        ({"temperature": False}, "temperature must be a number, not a truth value"),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number, not 1.5"),
        ({"max_tokens": "many"}, "max_tokens must be a whole number, not 'many'"),
        ({"max_tokens": "1.5"}, "max_tokens must be a whole number, not '1.5'"),
        ({"max_tokens": [1]}, "max_tokens must be a whole number, not a list"),
        ({"temperature": "warm"}, "temperature must be a number, not 'warm'"),
        ({"temperature": {}}, "temperature must be a number, not an object"),
        ({"temperature": math.nan}, "temperature must be between 0.0 and 100.0, not nan"),
        ({"temperature": "nan"}, "temperature must be between 0.0 and 100.0, not 'nan'"),
        ({"temperature": math.inf}, "temperature must be between 0.0 and 100.0, not inf"),
        ({"seed": math.inf}, "seed must be a whole number, not inf"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false, not 1"),
        ({"ignore_eos": "yes"}, "ignore_eos must be true or false, not 'yes'"),
        ({"stop": 3}, "stop must be a string or a list of strings, not 3"),
        ({"stop": ["a", 3]}, "stop must be a string or a list of strings, not ['a', 3]"),
        ({"stop": [""]}, "stop has an empty string"),
        ({"stop": ["a"] * (MAX_STOP_STRINGS + 1)}, "stop has 17 strings; at most 16 are allowed"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be a list of token ids, not [-1]"),
        ({"stop_token_ids": [True]}, "stop_token_ids must be a list of token ids, not [True]"),
        ({"stop_token_ids": 2}, "stop_token_ids must be a list of token ids, not 2"),
        ({"n": 2}, "n must be 1, not 2"),
        (
            {"max_tokens": 3, "max_new_tokens": 3},
            "sampling parameter 'max_tokens' is given twice (also as 'max_new_tokens')",
        ),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens 5 is above max_tokens 4"),
    ],
)
def test_a_wrong_value_is_refused_in_words_that_help(values: dict[str, object], told: str) -> None:
    with pytest.raises(InvalidSampling) as refused:
        sampling_from(values)
    assert refused.value.text == told


def test_an_unknown_name_is_answered_with_the_allowed_ones() -> None:
    with pytest.raises(InvalidSampling) as refused:
        sampling_from({"temprature": 1})
    assert refused.value.text.startswith("unknown sampling parameter 'temprature'; allowed: frequency_penalty, ")
    listed = set(refused.value.text.partition("allowed: ")[2].split(", "))
    assert listed == NAMES - {"n", "best_of", "stream"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[1]", "sampling_parameters must be a JSON object, not a list"),
        ('"a"', "sampling_parameters must be a JSON object, not a string"),
        ("null", "sampling_parameters must be a JSON object, not null"),
        ("true", "sampling_parameters must be a JSON object, not a truth value"),
        ("3", "sampling_parameters must be a JSON object, not a int"),
        ("{", "sampling_parameters is not JSON: "),
        ('{"max_tokens": ' + "9" * 5000 + "}", "sampling_parameters is not JSON: "),
        ("[" * 50_000, "sampling_parameters is not JSON: "),
    ],
)
def test_what_is_no_json_object_is_refused(text: str, told: str) -> None:
    with pytest.raises(InvalidSampling) as refused:
        parse_sampling(text)
    assert refused.value.text.startswith(told)


def test_json_that_says_nan_is_refused() -> None:
    with pytest.raises(InvalidSampling, match="top_p must be between"):
        parse_sampling('{"top_p": NaN}')


parameters = st.builds(
    SamplingParameters,
    max_tokens=st.integers(100, 2**31 - 1),
    min_tokens=st.integers(0, 100),
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(1e-9, 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(1e-3, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    stop=st.lists(st.text(min_size=1), max_size=16).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 2**31), max_size=4).map(tuple),
    include_stop_str_in_output=st.booleans(),
    ignore_eos=st.booleans(),
    skip_special_tokens=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
)


@given(parameters)
def test_the_decoder_reads_back_what_the_relay_wrote(values: SamplingParameters) -> None:
    assert parse_sampling(values.to_json()) == values


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(sorted(NAMES)), json_values, max_size=5))
def test_any_json_gives_parameters_or_a_refusal(values: dict[str, object]) -> None:
    try:
        parsed = parse_sampling(json.dumps(values))
    except InvalidSampling:
        return
    assert parse_sampling(parsed.to_json()) == parsed
