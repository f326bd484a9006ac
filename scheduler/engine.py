"""The config.pbtxt of `clip_engine`: the encoder's TensorRT engine as a native model of Triton.

What is known to crash Triton, or to leave its graphs unused without a word, is refused here.
"""

from __future__ import annotations

from scheduler.plan import ENCODER, ENGINE, Plan, Replica
from scheduler.profile import EngineTable

GRAPH_BATCHES = (1, 2, 4, 8)
LARGEST_BATCH = 8  # of the engine's optimisation profile
ENGINE_FILE = "model.plan"  # in the model's version folder


class EngineConfigRefused(ValueError):
    """Settings under which Triton crashes or computes something else; the message names the key."""


def engine_name(encoder: Replica) -> str:
    """The engine model that an encoder asks: `clip_engine` for `clip_encoder`, with its number."""
    return ENGINE + encoder.name.removeprefix(ENCODER)


def check_engine(plan: Plan) -> None:
    """That these settings can be served.

    Raises:
        EngineConfigRefused: one that cannot.
    """
    encode, engine = plan.encode, plan.engine
    if encode.graphs and engine.output_copy_stream:
        raise EngineConfigRefused(
            "engine.output_copy_stream: true; allowed with encode.graphs = true: false, since Triton crashes with both"
        )
    if encode.max_batch > LARGEST_BATCH:
        raise EngineConfigRefused(
            f"encode.max_batch: {encode.max_batch}; allowed with encode.runtime 'triton': 1 to {LARGEST_BATCH}, which "
            "the engine is built for"
        )


def engine_config(plan: Plan, encoder: Replica) -> str:
    """The whole text of the model's config.

    Raises:
        EngineConfigRefused: as `check_engine`.
    """
    check_engine(plan)
    size, tokens, width = plan.engine.image_size, plan.engine.image_tokens, plan.engine.width
    batches = (*(batch for batch in GRAPH_BATCHES if batch < plan.encode.max_batch), plan.encode.max_batch)
    pixels = f"3, {size}, {size}"
    lines = [
        "# Pixel values to features, by TensorRT: written by 'python -m scheduler render'; edits are lost.",
        f'name: "{engine_name(encoder)}"',
        'platform: "tensorrt_plan"',
        f"max_batch_size: {plan.encode.max_batch}",
        f'input [ {{ name: "pixel_values" data_type: TYPE_FP16 dims: [ {pixels} ] }} ]',
        f'output [ {{ name: "features" data_type: TYPE_FP16 dims: [ {tokens}, {width} ] }} ]',
        f"instance_group [ {{ count: 1 kind: KIND_GPU gpus: [ {encoder.device.removeprefix('cuda:')} ] }} ]",
        f"dynamic_batching {{ preferred_batch_size: [ {', '.join(map(str, batches))} ] "
        f"max_queue_delay_microseconds: {plan.engine.queue_delay_us} }}",
        *_optimization(plan.engine, batches if plan.encode.graphs else (), pixels),
        *(_warm_up(batch, pixels) for batch in batches),
    ]
    return "\n".join(lines) + "\n"


def _optimization(engine: EngineTable, graphs: tuple[int, ...], pixels: str) -> list[str]:
    """Graphs of every batch size, each also for the smaller ones down to the next."""
    lines = [
        "optimization {",
        "  cuda {",
        f"    graphs: {_word(bool(graphs))} busy_wait_events: {_word(engine.busy_wait_events)} "
        f"output_copy_stream: {_word(engine.output_copy_stream)}",
    ]
    smallest = 1
    for batch in graphs:
        shape = f'input {{ key: "pixel_values" value: {{ dim: [ {pixels} ] }} }}'
        lower = f" graph_lower_bound {{ batch_size: {smallest} {shape} }}" if smallest < batch else ""
        lines.append(f"    graph_spec {{ batch_size: {batch} {shape}{lower} }}")
        smallest = batch + 1
    return [
        *lines,
        "  }",
        f"  gather_kernel_buffer_threshold: {engine.gather_kernel_buffer_threshold} "
        f"eager_batching: {_word(engine.eager_batching)}",
        "  input_pinned_memory { enable: true } output_pinned_memory { enable: true }",
        "}",
    ]


def _warm_up(batch: int, pixels: str) -> str:
    value = f"data_type: TYPE_FP16 dims: [ {pixels} ] random_data: true"
    return (
        f'model_warmup [ {{ name: "batch_{batch}" batch_size: {batch} '
        f'inputs {{ key: "pixel_values" value: {{ {value} }} }} }} ]'
    )


def _word(value: bool) -> str:
    return "true" if value else "false"
