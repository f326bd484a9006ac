"""`clip_engine`: a config that Triton's schema reads, and settings that it is known not to survive."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from scheduler.engine import EngineConfigRefused
from scheduler.placement import PlacementRefused, place
from scheduler.plan import ENGINE, Plan
from scheduler.profile import EncodeTable, EngineTable, Profile
from scheduler.render import MARK, RenderRefused, render, write
from tests.golden.refresh import REPOSITORY, plan_of


def plan_with(encode: dict[str, object] | None = None, engine: dict[str, object] | None = None) -> Plan:
    """Two encoders on GPUs of eight, whose engines Triton runs."""
    plan = plan_of("eight_gpu")
    return plan.model_copy(
        update={
            "encoders": plan.encoders[:2],
            "encode": EncodeTable.model_validate({**plan.encode.model_dump(), "runtime": "triton", **(encode or {})}),
            "engine": EngineTable.model_validate(engine or {}),
        }
    )


def configs(plan: Plan) -> dict[str, model_config_pb2.ModelConfig]:
    """The engines' configs as Triton reads them."""
    return {
        model.name: text_format.Parse(model.config, model_config_pb2.ModelConfig())
        for model in render(plan, REPOSITORY)
        if model.source == ENGINE
    }


def test_each_encoder_has_an_engine_on_its_own_gpu() -> None:
    plan = plan_with()

    found = configs(plan)

    assert list(found) == ["clip_engine_0", "clip_engine_1"]
    for encoder, config in zip(plan.encoders, found.values(), strict=True):
        (group,) = config.instance_group
        assert (config.platform, config.max_batch_size) == ("tensorrt_plan", 8)
        assert (group.kind, list(group.gpus)) == (
            model_config_pb2.ModelInstanceGroup.KIND_GPU,
            [int(encoder.device.removeprefix("cuda:"))],
        )
        assert [(each.name, each.data_type, list(each.dims)) for each in (*config.input, *config.output)] == [
            ("pixel_values", model_config_pb2.TYPE_FP16, [3, 336, 336]),
            ("features", model_config_pb2.TYPE_FP16, [576, 4096]),
        ]


@pytest.mark.parametrize(
    ("max_batch", "specs"),
    [(1, [(1, 0)]), (3, [(1, 0), (2, 0), (3, 0)]), (8, [(1, 0), (2, 0), (4, 3), (8, 5)])],
)
def test_a_graph_serves_its_batch_size_and_those_down_to_the_next(max_batch: int, specs: list[tuple[int, int]]) -> None:
    config = configs(plan_with({"max_batch": max_batch}))["clip_engine_0"]

    cuda = config.optimization.cuda
    assert (cuda.graphs, cuda.output_copy_stream) == (True, False)
    assert [(spec.batch_size, spec.graph_lower_bound.batch_size) for spec in cuda.graph_spec] == specs
    assert [warmup.batch_size for warmup in config.model_warmup] == [batch for batch, _ in specs]


def test_graphs_can_be_turned_off() -> None:
    cuda = configs(plan_with({"graphs": False}, {"output_copy_stream": True}))["clip_engine_0"].optimization.cuda

    assert (cuda.graphs, cuda.output_copy_stream, list(cuda.graph_spec)) == (False, True, [])


@pytest.mark.parametrize(
    ("encode", "engine", "told"),
    [
        (
            {},
            {"output_copy_stream": True},
            "engine.output_copy_stream: true; allowed with encode.graphs = true: false, since Triton crashes with both",
        ),
        (
            {"max_batch": 16},
            {},
            "encode.max_batch: 16; allowed with encode.runtime 'triton': 1 to 8, which the engine is built for",
        ),
    ],
)
def test_what_triton_does_not_survive_is_refused(
    encode: dict[str, object], engine: dict[str, object], told: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineConfigRefused) as refused:
        write(plan_with(encode, engine), REPOSITORY, tmp_path / "out")

    assert str(refused.value) == told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("runtime", ["tensorrt", "triton"])
def test_an_engine_needs_a_gpu_and_is_float16(runtime: str) -> None:
    on_cpu = Profile(encode=EncodeTable.model_validate({"runtime": runtime, "dtype": "float16"}))
    in_float32 = Profile(encode=EncodeTable.model_validate({"runtime": runtime, "devices": ("cuda:0",)}))

    with pytest.raises(PlacementRefused, match=f"encode.runtime: '{runtime}' needs a GPU; on a CPU allowed"):
        place(on_cpu)
    with pytest.raises(PlacementRefused, match=f"'float32'; allowed with encode.runtime '{runtime}': 'float16'"):
        place(in_float32)


def test_a_cache_of_responses_would_repeat_handles_and_is_refused(tmp_path: Path) -> None:
    for name in ("llava", "clip_encoder", "llava_decoder"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.pbtxt").write_text((REPOSITORY / name / "config.pbtxt").read_text())
    path = tmp_path / "clip_encoder" / "config.pbtxt"
    path.write_text(path.read_text().replace(MARK, f"response_cache {{ enable: true }}\n{MARK}"))

    with pytest.raises(RenderRefused, match="response_cache; allowed: none, since it would repeat handles"):
        write(plan_of("cpu"), tmp_path, tmp_path / "out")
