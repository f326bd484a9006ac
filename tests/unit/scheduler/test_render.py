"""Rendered repositories: as the golden files say, and as Triton's own schema reads them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from scheduler.__main__ import main
from scheduler.placement import place
from scheduler.plan import DECODER, ENCODER, FRONT, PLAN_FILE, Replica, read_plan
from scheduler.profile import DecodeTable, EncodeTable, Profile, read_profile
from scheduler.render import MARK, RenderRefused, render, write

ROOT = Path(__file__).resolve().parents[3]
REPOSITORY = ROOT / "model_repository"
GOLDEN = ROOT / "tests" / "golden"
CPU = ROOT / "deploy" / "profiles" / "cpu.toml"
POOLS = GOLDEN / "pools.toml"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of the committed repository."""
    return shutil.copytree(REPOSITORY, tmp_path / "repository", ignore=shutil.ignore_patterns("__pycache__"))


def texts(folder: Path) -> dict[str, str]:
    """The text of every config and of the plan, by path."""
    paths = [*folder.glob("*/config.pbtxt"), folder / PLAN_FILE]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in sorted(paths)}


def parsed(text: str) -> model_config_pb2.ModelConfig:
    """A config as Triton reads it."""
    return text_format.Parse(text, model_config_pb2.ModelConfig())


@pytest.mark.parametrize(("profile", "golden"), [(CPU, GOLDEN / "cpu"), (POOLS, GOLDEN / "pools")])
def test_a_profile_renders_as_its_golden_files_say(profile: Path, golden: Path, tmp_path: Path) -> None:
    write(place(read_profile(profile)), REPOSITORY, tmp_path)

    assert texts(tmp_path) == texts(golden)


def test_the_committed_repository_is_the_cpu_profile(tmp_path: Path) -> None:
    write(place(read_profile(CPU)), REPOSITORY, tmp_path)

    assert texts(tmp_path) == texts(REPOSITORY)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_triton_reads_every_rendered_config(num_replicas: int) -> None:
    profile = Profile(
        encode=EncodeTable(replicas=num_replicas, max_batch=5, queue_delay_us=77),
        decode=DecodeTable(replicas=num_replicas),
    )

    configs = {model.name: parsed(model.config) for model in render(place(profile), REPOSITORY)}

    numbers = [""] if num_replicas == 1 else ["_0", "_1"]
    encoders, decoders = ([f"{model}{number}" for number in numbers] for model in (ENCODER, DECODER))
    assert list(configs) == [FRONT, *encoders, *decoders]
    for name, config in configs.items():
        assert (config.name, config.backend) == (name, "python")
        assert [(group.count, group.kind) for group in config.instance_group] == [
            (1, model_config_pb2.ModelInstanceGroup.KIND_CPU)
        ]
        assert config.model_transaction_policy.decoupled == (name not in encoders)
        assert config.max_batch_size == (5 if name in encoders else 0)
    assert {configs[name].dynamic_batching.max_queue_delay_microseconds for name in encoders} == {77}


def test_a_replica_on_a_gpu_names_it() -> None:
    plan = place(Profile()).model_copy(update={"decoders": (Replica(name=DECODER, device="cuda:3"),)})

    configs = {model.name: parsed(model.config) for model in render(plan, REPOSITORY)}

    (group,) = configs[DECODER].instance_group
    assert (group.kind, list(group.gpus)) == (model_config_pb2.ModelInstanceGroup.KIND_GPU, [3])


def test_the_contract_is_that_of_the_tensors_page() -> None:
    front, encoder, decoder = (
        parsed((REPOSITORY / name / "config.pbtxt").read_text()) for name in (FRONT, ENCODER, DECODER)
    )

    assert {tensor.name for tensor in front.input if not tensor.optional} == set()
    assert [tensor.name for tensor in encoder.input] == ["image"]
    assert {tensor.name for tensor in decoder.input if not tensor.optional} == set()
    page = (REPOSITORY / "README.md").read_text()
    for config in (front, encoder, decoder):
        for tensor in (*config.input, *config.output):
            assert f"`{tensor.name}`" in page, f"{config.name}: {tensor.name} is not described"


def test_each_replica_runs_the_code_of_its_model(tmp_path: Path) -> None:
    names = write(place(read_profile(POOLS)), REPOSITORY, tmp_path)

    assert names == [FRONT, "clip_encoder_0", "clip_encoder_1", "llava_decoder_0", "llava_decoder_1"]
    for name in names:
        model = name.rstrip("_01")
        assert (tmp_path / name / "1" / "model.py").resolve() == REPOSITORY / model / "1" / "model.py"


def test_rendering_onto_itself_changes_only_below_the_mark(repository: Path) -> None:
    before = texts(repository)

    write(place(Profile(encode=EncodeTable(max_batch=3, queue_delay_us=9))), repository, repository)

    after = texts(repository)
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"clip_encoder/config.pbtxt", PLAN_FILE}
    above, below = after["clip_encoder/config.pbtxt"].split(MARK)
    assert above == before["clip_encoder/config.pbtxt"].split(MARK)[0]
    assert below == (
        "\nmax_batch_size: 3\n"
        "dynamic_batching { max_queue_delay_microseconds: 9 }\n"
        "instance_group [ { count: 1 kind: KIND_CPU } ]\n"
    )


def test_rendering_twice_is_rendering_once(tmp_path: Path) -> None:
    plan = place(read_profile(POOLS))
    write(plan, REPOSITORY, tmp_path)
    once = texts(tmp_path)

    write(plan, REPOSITORY, tmp_path)

    assert texts(tmp_path) == once
    assert read_plan(tmp_path) == plan


def test_what_was_edited_below_the_mark_is_lost_and_above_is_kept(repository: Path, tmp_path: Path) -> None:
    path = repository / FRONT / "config.pbtxt"
    path.write_text("# a note\n" + path.read_text() + "parameters { key: 'mine' }\n")

    write(place(Profile()), repository, tmp_path / "out")

    text = (tmp_path / "out" / FRONT / "config.pbtxt").read_text()
    assert text.startswith("# a note\n")
    assert "mine" not in text


def test_numbered_replicas_are_not_written_beside_their_model(repository: Path) -> None:
    before = texts(repository)

    with pytest.raises(RenderRefused) as refused:
        write(place(read_profile(POOLS)), repository, repository)
    assert str(refused.value) == (
        f"{repository}: clip_encoder_0, clip_encoder_1, llava_decoder_0, llava_decoder_1 must go into a folder of "
        "their own; give --out"
    )
    assert texts(repository) == before


@pytest.mark.parametrize("damage", ["no config", "no mark"])
def test_a_repository_without_contracts_is_refused_by_file(repository: Path, tmp_path: Path, damage: str) -> None:
    path = repository / ENCODER / "config.pbtxt"
    if damage == "no config":
        path.unlink()
        told = "No such file or directory"
    else:
        path.write_text("name: 'clip_encoder'\n")
        told = f"has no line {MARK!r}"

    with pytest.raises(RenderRefused) as refused:
        write(place(Profile()), repository, tmp_path / "out")
    assert str(refused.value) == f"{path}: {told}"
    assert not (tmp_path / "out").exists()  # nothing half written


def test_the_command_renders_and_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", str(CPU), "--out", str(tmp_path / "out")]) == 0

    out, err = capsys.readouterr()
    assert (out, err) == (f"rendered llava, clip_encoder, llava_decoder into {tmp_path / 'out'}\n", "")
    assert texts(tmp_path / "out") == texts(GOLDEN / "cpu")


def test_the_command_says_in_one_line_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "missing.toml"

    assert main(["render", str(missing)]) == 2

    assert capsys.readouterr() == ("", f"render: profile {missing}: No such file or directory\n")
