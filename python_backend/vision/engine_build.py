"""ONNX graph to TensorRT engine. `trt` is the module `tensorrt`, or `tensorrt_rtx`, which builds without a GPU."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from python_backend.checkpoint import CheckpointFacts
from python_backend.transport.cuda import CudaDevice
from python_backend.vision.engine_file import EngineManifest, digest_graph, engine_path, read_engine, write_engine
from python_backend.vision.export import export, is_current, onnx_file

logger = logging.getLogger(__name__)

BATCHES = (1, 4, 8)  # of the optimisation profile: smallest, best, largest
TIMING_CACHE_FILE = "encoder.timing"
Progress = Callable[[str, float], None]  # phase, share done


class EngineRefused(RuntimeError):
    """No engine can be built or run here; the message says what to do."""


def import_tensorrt() -> Any:
    """The module `tensorrt`.

    Raises:
        EngineRefused: it is not installed, or does not load.
    """
    try:
        import tensorrt
    except ImportError as error:
        raise EngineRefused(
            f"TensorRT cannot be imported ({error}): use NVIDIA's Triton image, or pip install -e '.[gpu]' on a "
            "machine with a GPU; without it encode.runtime may be 'torch', or 'onnxruntime' on a CPU"
        ) from error
    return tensorrt


def ensure_engine(
    trt: Any,
    facts: CheckpointFacts,
    artifacts: Path,
    device: CudaDevice,
    progress: Progress,
    check: Callable[[bytes], None],
    is_forced: bool = False,
) -> Path:
    """The file of a checkpoint's engine for a GPU; built where none is there or it is another's.

    `check` is given a new engine before it is kept, and raises if it is wrong. Two processes that want the same
    engine build it once.

    Raises:
        EngineRefused: TensorRT does not take the graph.
        ExportFailed: the graph cannot be exported.
    """
    artifacts.mkdir(parents=True, exist_ok=True)
    with (artifacts / ".engine.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_current(facts, artifacts, "float16"):
            logger.info("no current float16 graph in %s: exporting it", artifacts)
            export(facts, artifacts, "float16")
        graph = artifacts / onnx_file("float16")
        wanted = manifest_of(trt, graph, device)
        path = engine_path(artifacts, device.compute_capability)
        data, why = read_engine(path, wanted)
        if data is None or is_forced:
            logger.warning("%s: building the engine for %s (minutes)", why or "as told", device.name)
            device.make_current()
            data = build(trt, graph, facts.image_size, artifacts / TIMING_CACHE_FILE, progress)
            check(data)
            write_engine(path, data, wanted)
    return path


def manifest_of(trt: Any, graph: Path, device: CudaDevice) -> EngineManifest:
    """What an engine for this machine must say."""
    return EngineManifest(trt.__version__, device.name, device.compute_capability, digest_graph(graph), BATCHES)


def build(
    trt: Any,
    graph: Path,
    image_size: int,
    timing_cache: Path | None,
    progress: Progress = lambda phase, share: None,
    adjust: Callable[[Any], None] = lambda config: None,
) -> bytes:
    """The engine of an ONNX graph, in the types that the graph has. `adjust` may change the builder's configuration.

    Raises:
        EngineRefused: the parser or the builder does not take the graph; with their own words.
    """
    log = _logger(trt)
    builder = trt.Builder(log)
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if flag is None else 1 << int(flag))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(graph)):
        faults = "; ".join(str(parser.get_error(index)) for index in range(parser.num_errors))
        raise EngineRefused(f"TensorRT {trt.__version__} does not take {graph.name}: {faults}")
    config = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    profile.set_shape("pixel_values", *((batch, 3, image_size, image_size) for batch in BATCHES))
    config.add_optimization_profile(profile)
    config.progress_monitor = _monitor(trt, progress)
    adjust(config)
    cache = config.create_timing_cache(_read(timing_cache))
    config.set_timing_cache(cache, ignore_mismatch=True)
    data = builder.build_serialized_network(network, config)
    if data is None:
        raise EngineRefused(f"TensorRT {trt.__version__} could not build {graph.name}: {log.last or 'no reason given'}")
    if timing_cache is not None:
        timing_cache.write_bytes(bytes(config.get_timing_cache().serialize()))
    return bytes(data)


def _read(path: Path | None) -> bytes:
    return path.read_bytes() if path is not None and path.is_file() else b""


def _logger(trt: Any) -> Any:
    """TensorRT's messages in our log; its last error is kept for the message to the user."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.last = ""

        def log(self, severity: Any, text: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.last = text
                logger.error("TensorRT: %s", text)
            elif severity == trt.ILogger.Severity.WARNING:
                logger.info("TensorRT: %s", text)

    return Log()


def _monitor(trt: Any, progress: Progress) -> Any:
    """TensorRT's progress, told phase by phase."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._sizes: dict[str, int] = {}

        def phase_start(self, phase: str, parent: str | None, num_steps: int) -> None:
            self._sizes[phase] = num_steps

        def step_complete(self, phase: str, step: int) -> bool:
            progress(phase, (step + 1) / max(self._sizes.get(phase, 1), 1))
            return True  # go on

        def phase_finish(self, phase: str) -> None:
            progress(phase, 1.0)

    return Monitor()
