"""What a checkpoint folder says about itself, and which folders are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from python_backend.checkpoint import PROJECT_ROOT, CheckpointFacts, CheckpointRefused, fingerprint, read_facts, resolve


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(checkpoint, tmp_path / "checkpoint")


def edit(path: Path, **values: object) -> None:
    """Sets values at the top of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_the_facts_are_those_of_llava_1_5_in_small(facts: CheckpointFacts, checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())

    assert facts == CheckpointFacts(
        path=checkpoint,
        image_token_id=3,
        image_tokens=576,
        image_size=336,
        width=config["text_config"]["hidden_size"],
        context_tokens=config["text_config"]["max_position_embeddings"],
        fingerprint=fingerprint(checkpoint),
    )
    assert len(facts.fingerprint) == 16


def test_the_full_strategy_keeps_the_class_token(folder: Path) -> None:
    edit(folder / "config.json", vision_feature_select_strategy="full")

    assert read_facts(folder).image_tokens == 577


def test_a_copy_elsewhere_has_the_same_fingerprint(folder: Path, checkpoint: Path) -> None:
    assert fingerprint(folder) == fingerprint(checkpoint)


@pytest.mark.parametrize("place", [8, 1000, -1000, -1])
def test_a_weight_byte_changes_the_fingerprint(folder: Path, place: int) -> None:
    before = fingerprint(folder)
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[place] ^= 1

    weights.write_bytes(bytes(data))

    assert fingerprint(folder) != before


def test_a_longer_weight_file_changes_the_fingerprint(folder: Path) -> None:
    before = fingerprint(folder)
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    half = len(data) // 2

    weights.write_bytes(data[:half] + b"\0" + data[half:])

    assert fingerprint(folder) != before


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json", "processor_config.json", "tokenizer.json"])
def test_configuration_and_tokenizer_change_the_fingerprint(folder: Path, name: str) -> None:
    before = fingerprint(folder)

    edit(folder / name, added_by_a_test=True)
    edited = fingerprint(folder)
    (folder / name).unlink()

    assert len({before, edited, fingerprint(folder)}) == 3


def test_what_does_not_shape_features_leaves_the_fingerprint(folder: Path) -> None:
    before = fingerprint(folder)

    (folder / "README.md").write_text("notes")
    edit(folder / "generation_config.json", temperature=1.0)

    assert fingerprint(folder) == before


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointRefused) as refused:
            read_facts(path)
        assert str(refused.value) == f"checkpoint {path}: no config.json there"


def test_another_architecture_is_refused_by_name(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama"}')

    with pytest.raises(CheckpointRefused) as refused:
        read_facts(folder)
    assert str(refused.value) == f"checkpoint {folder}: model_type is 'llama'; served: 'llava', 'llava_next'"


@pytest.mark.parametrize("text", ["not json", "{}", "[]", '{"model_type": "nobody-knows-this"}'])
def test_a_config_that_cannot_be_read_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)

    with pytest.raises(CheckpointRefused) as refused:
        read_facts(folder)
    assert str(refused.value).startswith(f"checkpoint {folder}: ")


def test_weights_that_were_cut_short_are_refused_by_file(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])

    with pytest.raises(CheckpointRefused) as refused:
        read_facts(folder)
    assert str(refused.value).startswith(f"checkpoint {weights}: damaged or cut short: ")


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()

    with pytest.raises(CheckpointRefused) as refused:
        read_facts(folder)
    assert str(refused.value) == f"checkpoint {folder}: no *.safetensors file there"


def test_a_relative_path_starts_at_the_projects_root(tmp_path: Path) -> None:
    assert resolve("demo/checkpoint") == PROJECT_ROOT / "demo" / "checkpoint"
    assert resolve(str(tmp_path)) == tmp_path.resolve()
