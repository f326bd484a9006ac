"""The TensorRT runtime on the stand-in driver: real graphs' calls, features that stay on the GPU, clear refusals."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from launcher.build import BuildFailed, build, engine_files, fit_engine
from python_backend.checkpoint import CheckpointFacts
from python_backend.transport.boot import BootKey
from python_backend.transport.cuda import CudaDevice
from python_backend.transport.device import DeviceSegment
from python_backend.transport.handle import fingerprint_of
from python_backend.transport.layout import SegmentLayout
from python_backend.transport.store import EmbeddingStore
from python_backend.vision.buckets import to_host
from python_backend.vision.engine_build import EngineRefused, ensure_engine, import_tensorrt
from python_backend.vision.tensorrt import load_engine
from scheduler.profile import EncodeTable
from tests.golden.refresh import plan_of
from tests.unit.vision.fake_tensorrt import FakeTensorRt

TOKENS, WIDTH = 2, 8


@pytest.fixture
def small(facts: CheckpointFacts) -> CheckpointFacts:
    return replace(facts, image_size=4, image_tokens=TOKENS, width=WIDTH)


def images(number: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((number, 3, 4, 4), dtype=np.float32)


def expected(pixels: np.ndarray) -> np.ndarray:
    return pixels.astype(np.float16).reshape(len(pixels), -1)[:, : TOKENS * WIDTH].reshape(-1, TOKENS, WIDTH)


@pytest.mark.parametrize("uses_graphs", [True, False])
def test_features_stay_on_the_gpu_and_are_those_of_each_image(
    device: CudaDevice, small: CheckpointFacts, uses_graphs: bool
) -> None:
    trt = FakeTensorRt(device, TOKENS * WIDTH)
    encoder = load_engine(trt, b"engine", device, small, uses_graphs, max_batch=8)
    trt.num_runs = 0

    for number in (3, 1, 8):
        rows = encoder.encode(images(number, seed=number))
        assert not any(isinstance(each, np.ndarray) for each in rows)
        np.testing.assert_array_equal([to_host(each) for each in rows], expected(images(number, seed=number)))

    assert encoder.graphs == ((1, 2, 4, 8) if uses_graphs else ())
    assert trt.num_runs == (0 if uses_graphs else 3)  # a replay asks TensorRT nothing
    encoder.close()


def test_features_go_from_the_engine_to_the_store_without_the_host(
    device: CudaDevice, small: CheckpointFacts, tmp_path: Path
) -> None:
    encoder = load_engine(FakeTensorRt(device, TOKENS * WIDTH), b"engine", device, small, True, max_batch=2)
    layout = SegmentLayout(num_slots=2, slot_bytes=TOKENS * WIDTH * 2, num_leases=4, memory="both")
    segment = DeviceSegment.allocate("1-1-1", layout, device, tmp_path)
    store = EmbeddingStore(segment, fingerprint_of("m"), lambda: 0.0)

    for index, rows in enumerate(encoder.encode(images(2))):
        slot = store.reserve(bytes([index]) * 16, (TOKENS, WIDTH), "float16")
        slot.write(rows)
        store.release(store.commit(slot))
        np.testing.assert_array_equal(slot.array, expected(images(2))[index])

    store.close()
    encoder.close()


def test_an_engine_that_does_not_load_says_what_to_do(device: CudaDevice, small: CheckpointFacts) -> None:
    with pytest.raises(EngineRefused, match=r"TensorRT 10\.9\.0 does not load the engine; build it anew"):
        load_engine(FakeTensorRt(device, 16), b"other", device, small, True, max_batch=8)


def test_an_engine_for_smaller_batches_says_so(device: CudaDevice, small: CheckpointFacts) -> None:
    trt = FakeTensorRt(device, TOKENS * WIDTH)
    trt.largest_batch = 4

    with pytest.raises(EngineRefused, match="the engine takes no batch of 8"):
        load_engine(trt, b"engine", device, small, True, max_batch=8)


class Builder:
    """Counts builds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_builds = 0
        monkeypatch.setattr("python_backend.vision.engine_build.build", self)

    def __call__(self, *arguments: object) -> bytes:
        self.num_builds += 1
        return b"engine"


def test_an_engine_is_built_once_and_anew_where_it_does_not_fit(
    device: CudaDevice,
    facts: CheckpointFacts,
    half_graph: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    builder, trt, artifacts = Builder(monkeypatch), FakeTensorRt(device, 16), half_graph.parent
    checked: list[bytes] = []

    def ensure(is_forced: bool = False) -> Path:
        return ensure_engine(trt, facts, artifacts, device, lambda *_: None, checked.append, is_forced)

    with caplog.at_level(logging.WARNING):
        path = ensure()
        ensure()
        trt.__version__ = "10.13.0"
        ensure()
        ensure(is_forced=True)

    assert (path.name, path.read_bytes(), builder.num_builds) == ("encoder.sm90.engine", b"engine", 3)
    assert checked == [b"engine"] * 3
    assert [record.getMessage().partition(": building")[0] for record in caplog.records] == [
        "encoder.sm90.engine is not there",
        "encoder.sm90.engine was built for tensorrt '10.9.0', this is '10.13.0'",
        "as told",
    ]
    path.unlink()


def test_an_engine_that_computes_something_else_is_not_kept(
    device: CudaDevice, facts: CheckpointFacts, half_graph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Builder(monkeypatch)

    def refuse(data: bytes) -> None:
        raise EngineRefused("the engine's features are off")

    with pytest.raises(EngineRefused, match="are off"):
        ensure_engine(
            FakeTensorRt(device, 16), facts, half_graph.parent, device, lambda *_: None, refuse, is_forced=True
        )
    assert not list(half_graph.parent.glob("*.engine"))


def test_without_tensorrt_the_line_says_where_to_get_it() -> None:
    with pytest.raises(EngineRefused, match=r"TensorRT cannot be imported .*encode\.runtime may be 'torch'"):
        import_tensorrt()


def test_without_a_gpu_the_build_says_where_it_must_run(standin_library: Path) -> None:
    with pytest.raises(BuildFailed, match=r"^cuda:0: an engine is built on the GPU that will run it: no NVIDIA driver"):
        build(plan_of("two_gpu"), print)


def test_with_a_gpu_and_without_tensorrt_the_build_says_so(standin_library: Path) -> None:
    import os

    variables = {**os.environ, "LD_LIBRARY_PATH": str(standin_library.parent)}
    with pytest.raises(BuildFailed, match=r"^cuda:0: TensorRT cannot be imported"):
        build(plan_of("two_gpu"), print, variables=variables)


def test_triton_gets_each_engine_where_it_looks_for_it() -> None:
    plan = plan_of("eight_gpu")
    table = EncodeTable.model_validate({**plan.encode.model_dump(), "runtime": "triton"})
    plan = fit_engine(plan.model_copy(update={"encode": table}))
    devices = [each.device for each in plan.encoders]

    files = engine_files(plan, [Path(f"/artifacts/{device}") for device in devices])

    assert (plan.engine.image_size, plan.engine.image_tokens, plan.engine.width) == (336, 576, 192)
    assert files == {f"clip_engine_{i}/1/model.plan": Path(f"/artifacts/{name}") for i, name in enumerate(devices)}


@pytest.fixture
def boot() -> BootKey:
    return BootKey("1-1-1", bytes(32))
