"""`encode.runtime = "triton"`: the encoder asks another model of the same server by BLS.

The engine itself needs a GPU; here a model of the same name and tensors computes its graph by ONNX Runtime.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from client import RelayClient
from launcher.serve import DEFAULT_PROFILE, plan_of
from launcher.server import Server, choose_ports
from launcher.triton import find_triton
from python_backend.checkpoint import PROJECT_ROOT, read_facts, resolve
from python_backend.vision.export import export, is_current, onnx_file
from scheduler import render
from scheduler.plan import Plan
from tests.integration.observe import PICTURE, QUESTION

CONFIG = """
name: "clip_engine"
backend: "python"
max_batch_size: 8
input [ { name: "pixel_values" data_type: TYPE_FP16 dims: [ 3, 336, 336 ] } ]
output [ { name: "features" data_type: TYPE_FP16 dims: [ 576, 192 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""

MODEL = """
import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.session = onnxruntime.InferenceSession({graph!r}, providers=["CPUExecutionProvider"])

    def execute(self, requests):
        responses = []
        for request in requests:
            pixels = pb_utils.get_input_tensor_by_name(request, "pixel_values").as_numpy()
            features = self.session.run(["features"], {{"pixel_values": pixels}})[0]
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("features", features)]))
        return responses
"""


@pytest.fixture(scope="module")
def engine_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The CPU profile, with its encoder's runtime changed and the engine's model replaced."""
    plan = plan_of(DEFAULT_PROFILE, None)
    encode = plan.encode.model_copy(update={"runtime": "triton", "dtype": "float16"})
    engine = plan.engine.model_copy(update={"width": 192})
    plan = plan.model_copy(update={"encode": encode, "engine": engine})
    facts, artifacts = read_facts(resolve(plan.checkpoint)), resolve(plan.artifacts)
    if not is_current(facts, artifacts, "float16"):
        export(facts, artifacts, "float16")

    def write(plan: Plan, source: Path, target: Path) -> list[str]:
        names = render.write(plan, source, target)
        (target / "clip_engine" / "config.pbtxt").write_text(CONFIG)
        (target / "clip_engine" / "1" / "model.py").write_text(
            MODEL.format(graph=str(artifacts / onnx_file("float16")))
        )
        return names

    log_path = tmp_path_factory.mktemp("engine") / "server.log"
    with pytest.MonkeyPatch.context() as patch, log_path.open("w") as log:
        patch.setattr("launcher.server.write", write)
        started = Server(plan, find_triton(), choose_ports("127.0.0.1", 0, 0, 0), os.environ, log)
        try:
            started.wait_ready(120)
            yield started
        finally:
            started.stop()


def test_the_answer_comes_by_the_engine_of_another_model(engine_server: Server) -> None:
    with RelayClient(f"127.0.0.1:{engine_server.ports.grpc}") as client:
        answer = client.ask(QUESTION, images=[PICTURE]).text
        both = client.ask("How many objects are there?", images=[PICTURE, str(PROJECT_ROOT / "demo" / "picture.jpg")])

    assert answer.strip() == "a red circle to the left of a blue square"
    assert both.text.strip()
