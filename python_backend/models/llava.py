"""The `llava` model: the public door. Requests in, text out; the work is done by `python_backend.relay`."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from python_backend.checkpoint import resolve
from python_backend.errors import InternalError, RelayError
from python_backend.generate import GenerateRequest, RequestLimits, parse_generate
from python_backend.images import ImageLimits
from python_backend.models.adapter import failure, open_site, parameters, tensors, text_tensor, trace_of
from python_backend.models.metrics import TritonMeter
from python_backend.models.stages import BlsStages, now_s
from python_backend.placing import Placing
from python_backend.prompt import PromptBuilder
from python_backend.pulse import Pulse, is_beating, pulse_path
from python_backend.relay import Relay
from python_backend.stream import Progress, Reply
from python_backend.supervisor import PulseWatch
from python_backend.tracing import SpanExporter
from scheduler.cost import Costs, read_costs
from scheduler.plan import DRAIN_FILE, Plan
from scheduler.profile import LimitsTable
from scheduler.routing import Router

logger = logging.getLogger(__name__)

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """The scheduler in front of the stages."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the tokenizer and starts the relay."""
        site = open_site(args)
        plan = site.plan
        drain_file = site.repository / DRAIN_FILE
        self._limits = _request_limits(plan.limits)
        self._meter = TritonMeter(site.model, "llava")
        for replica in (*plan.encoders, *plan.decoders):
            for name in ("vlm_relay_deaths_total", "vlm_relay_recoveries_total"):
                self._meter.add(name, 0.0, {"replica": replica.name})
        for reason in ("full", "stages", "draining", "invalid"):
            self._meter.add("vlm_relay_rejected_total", 0.0, {"reason": reason})
        self._tracer = SpanExporter("vlm-relay-scheduler")
        self._placing = Placing(Router(plan, _costs(plan)), now_s)
        self._stages = BlsStages(site)
        self._relay = Relay(
            stages=self._stages,
            prompts=PromptBuilder(site.facts),
            placing=self._placing,
            limits=plan.limits,
            meter=self._meter,
            clock=now_s,
            is_draining=drain_file.exists,
            tracer=self._tracer,
            gate_width=2 * plan.encode.max_batch,
        )
        self._meter.poll(self._report)
        self._pulse = Pulse(pulse_path(site.boot.id, site.model))
        self._pulse_watch = PulseWatch(
            replicas=[replica.name for replica in (*plan.encoders, *plan.decoders)],
            is_alive=lambda name: is_beating(pulse_path(site.boot.id, name), now_s()),
            on_death=self._relay.replica_died,
            on_return=self._relay.replica_returned,
        )
        logger.info(
            "loaded: %s; %d in flight, %d waiting at most",
            site.facts.path,
            plan.limits.max_in_flight,
            plan.limits.max_waiting,
        )

    def execute(self, requests: list[Any]) -> None:
        """Hands every request to the relay, which answers through its response sender."""
        for request in requests:
            client = ResponseSender(request.get_response_sender())
            try:
                parsed = parse_generate(tensors(request), parameters(request), self._limits)
                self._relay.accept(parsed, client, trace_of(request))
            except RelayError as error:
                self._refuse(client, error)
            except Exception as error:
                logger.exception("a request could not be accepted")
                self._refuse(client, InternalError(f"the request could not be read: {type(error).__name__}"))

    def finalize(self) -> None:
        """Ends what is left."""
        self._pulse_watch.close()
        self._pulse.close()
        self._relay.close()
        self._stages.close()
        self._tracer.close()
        self._meter.close()
        logger.info("closed")

    def _report(self) -> None:
        """Tells what each replica has before it, as the scheduler sees it."""
        loads = self._placing.loads
        for name, encoder in loads.encoders.items():
            self._meter.set("vlm_relay_pending_images", encoder.pending_images, {"replica": name})
        for name, decoder in loads.decoders.items():
            self._meter.set("vlm_relay_pending_tokens", decoder.pending_tokens, {"replica": name})

    def _refuse(self, client: ResponseSender, error: RelayError) -> None:
        client.fail(error)
        logger.info("refused: %s", error)
        self._meter.add("vlm_relay_requests_total", labels={"outcome": error.code})
        self._meter.add("vlm_relay_rejected_total", labels={"reason": "invalid"})


class ResponseSender:
    """A client behind Triton's response sender. The caller sees to it that nothing follows the final word."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender

    def reply(self, reply: Reply, is_last: bool) -> None:
        """Sends one response."""
        self._sender.send(pb_utils.InferenceResponse(_outputs(reply)), flags=FINAL if is_last else 0)

    def progress(self, progress: Progress) -> None:
        """Sends a response that says how far the request is."""
        outputs = [text_tensor("text_output", ""), text_tensor("progress", progress.stage)]
        if progress.decision is not None:
            outputs.append(text_tensor("decision", json.dumps(progress.decision.to_dict())))
        self._sender.send(pb_utils.InferenceResponse(outputs))

    def fail(self, error: RelayError) -> None:
        """Sends an error and the final flag."""
        self._sender.send(failure(error), flags=FINAL)

    def is_cancelled(self) -> bool:
        """Whether the client is gone."""
        return bool(self._sender.is_cancelled())


def _costs(plan: Plan) -> dict[str, Costs] | None:
    """The measured costs that the plan names; None: those of rooflines."""
    if plan.schedule.costs is None:
        return None
    return read_costs(resolve(plan.schedule.costs))


def _request_limits(limits: LimitsTable) -> RequestLimits:
    return RequestLimits(
        max_images=limits.max_images,
        max_text_bytes=limits.max_text_kib << 10,
        image=ImageLimits(limits.max_image_mib << 20, limits.max_image_megapixels * 1_000_000),
    )


def _outputs(reply: Reply) -> list[Any]:
    request, chunk, returns = reply.request, reply.chunk, reply.request.returns
    text = (request.text or "") + chunk.text if _repeats_input(request, reply.prompt.text) else chunk.text
    outputs = [text_tensor("text_output", text)]
    if returns.finish_reason:
        outputs.append(text_tensor("finish_reason", str(chunk.finish_reason)))
    if returns.cumulative_logprob:
        outputs.append(pb_utils.Tensor("cumulative_logprob", np.array([chunk.cumulative_logprob], np.float32)))
    if returns.logprobs:
        wanted = request.sampling.logprobs is not None
        outputs.append(text_tensor("logprobs", json.dumps(chunk.logprobs) if wanted else "null"))
    if returns.num_input_tokens:
        outputs.append(pb_utils.Tensor("num_input_tokens", np.array([reply.prompt.num_tokens], np.uint32)))
    if returns.num_output_tokens:
        outputs.append(pb_utils.Tensor("num_output_tokens", np.array([len(chunk.token_ids)], np.uint32)))
    if reply.decision is not None:
        observed = reply.observed.to_dict() if reply.observed is not None else {}
        outputs.append(text_tensor("decision", json.dumps({**reply.decision.to_dict(), "observed": observed})))
    return outputs


def _repeats_input(request: GenerateRequest, prompt: str) -> bool:
    """As vLLM: a raw prompt is repeated unless the client streams or says no; a question only when it says so."""
    if request.is_streaming or request.text is None:
        return False
    return request.repeats_input if request.repeats_input is not None else prompt == request.text
