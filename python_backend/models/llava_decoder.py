"""The `llava_decoder` model: tokens and handles in, tokens and text out."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from python_backend.checkpoint import resolve
from python_backend.decoder.engine import Engine
from python_backend.decoder.landing import make_landing
from python_backend.decoder.options import EngineOptions, EngineStatus
from python_backend.decoder.protocol import DecodingEngine
from python_backend.decoder.sequence import DecodeRequest, ImageEmbedding
from python_backend.decoder.vllm_engine import VllmEngine
from python_backend.errors import InternalError, InvalidRequest, RelayError
from python_backend.models.adapter import open_site, tensors
from python_backend.models.deltas import FINAL, DeltaSender, refuse, to_caller, to_scheduler
from python_backend.models.metrics import TritonMeter
from python_backend.pulse import Pulse, pulse_path
from python_backend.request import parse_sampling
from python_backend.token_link import TokenSender
from python_backend.transport.device import Copied
from python_backend.transport.handle import EmbeddingHandle
from scheduler.profile import DecodeTable

logger = logging.getLogger(__name__)


class TritonPythonModel:
    """One decoder replica."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the weights and starts the engine."""
        site = open_site(args)
        self._site = site
        self._meter = TritonMeter(site.model, "llava_decoder")
        device = site.replica.device
        self._landing = make_landing(device, self._note_copy)
        options = _options(site.plan.decode, device)
        load = VllmEngine.load if site.plan.decode.engine == "vllm" else Engine.load
        self._engine: DecodingEngine = load(resolve(site.plan.checkpoint), options, time.monotonic)
        # Of this thread, the one of `execute`; the engine's has its own. What is computed here is small, and on a
        # busy machine waking a team of threads for it took 25 to 45 ms of each request with an image.
        torch.set_num_threads(1)
        self._sender = DeltaSender(self._meter)
        self._link = TokenSender(site.boot.id, site.model)
        self._engine.start()
        self._seen = EngineStatus()
        self._meter.poll(self._report)
        self._pulse = Pulse(pulse_path(site.boot.id, site.model))
        logger.info("loaded: %d KV blocks", self._engine.status().total_blocks)

    def execute(self, requests: list[Any]) -> None:
        """Submits generations and carries out cancels."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._accept(request, sender)
            except RelayError as error:
                refuse(sender, error)
            except Exception as error:
                logger.exception("a request could not be accepted")
                refused = InternalError(f"the decoder could not read the request: {type(error).__name__}")
                refuse(sender, refused)

    def finalize(self) -> None:
        """Ends every generation and the engine."""
        self._pulse.close()
        self._engine.close()
        self._sender.close()
        self._link.close()
        self._landing.close()
        self._meter.close()
        logger.info("closed")

    def _accept(self, request: Any, sender: Any) -> None:
        inputs = tensors(request)
        if "cancel" in inputs:
            self._engine.cancel(bytes(inputs["cancel"][0]).decode())
            sender.send(flags=FINAL)
            return
        if inputs.keys() == {"handles"}:
            self._release([bytes(item) for item in inputs["handles"]])
            sender.send(flags=FINAL)
            return
        missing = {"request_id", "token_ids"} - inputs.keys()
        if missing:
            raise InvalidRequest(f"llava_decoder needs {', '.join(sorted(missing))}, or cancel, or handles alone")
        deadline_ns = int(inputs["deadline_ns"][0]) if "deadline_ns" in inputs else 0
        began_s = time.monotonic()
        images = self._take_in([bytes(item) for item in inputs.get("handles", ())])
        transfer = {
            "transfer_s": time.monotonic() - began_s if images else 0.0,
            "transfer_bytes": sum(image.features.nbytes for image in images),
            "landed_s": time.monotonic(),
        }
        if images:
            self._meter.observe("vlm_relay_transfer_seconds", transfer["transfer_s"])
        job = DecodeRequest(
            request_id=bytes(inputs["request_id"][0]).decode(errors="replace"),
            token_ids=tuple(inputs["token_ids"].tolist()),
            images=images,
            sampling=parse_sampling(bytes(inputs["sampling_parameters"][0]).decode())
            if "sampling_parameters" in inputs
            else parse_sampling(""),
            deadline_s=deadline_ns / 1e9 if deadline_ns else None,
            generated_ids=tuple(inputs["generated_ids"].tolist()) if "generated_ids" in inputs else (),
            rank=float(inputs["rank"][0]) if "rank" in inputs else 0.0,
        )
        is_relayed = "is_relayed" in inputs and bool(inputs["is_relayed"][0])
        send = to_scheduler(self._link, job.request_id) if is_relayed else to_caller(sender)
        self._engine.submit(job, self._sender.stream(send, transfer))
        if is_relayed:
            sender.send(flags=FINAL)  # the tokens go another way

    def _take_in(self, sealed: list[bytes]) -> tuple[ImageEmbedding, ...]:
        """Copies the embeddings behind the handles; every lease that can be read is given back."""
        site = self._site
        handles = [EmbeddingHandle.open(data, site.boot, site.embedding_fingerprint) for data in sealed]
        try:
            return tuple(ImageEmbedding(handle.digest, self._landing.land(handle)) for handle in handles)
        finally:
            for handle in handles:
                self._landing.release(handle)

    def _note_copy(self, copied: Copied) -> None:
        self._meter.add("vlm_relay_embedding_copied_bytes_total", copied.num_bytes, {"route": copied.path})
        self._meter.observe("vlm_relay_embedding_copy_seconds", copied.seconds)

    def _release(self, sealed: list[bytes]) -> None:
        """Gives the leases on embeddings back that nobody wants to decode."""
        for data in sealed:
            self._landing.release(EmbeddingHandle.open(data, self._site.boot, self._site.embedding_fingerprint))

    def _report(self) -> None:
        status = self._engine.status()
        self._meter.set("vlm_relay_running_sequences", status.num_running)
        self._meter.set("vlm_relay_waiting_sequences", status.num_waiting)
        self._meter.set("vlm_relay_free_kv_blocks", status.free_blocks)
        self._meter.set("vlm_relay_kv_cache_usage_ratio", 1 - status.free_blocks / max(1, status.total_blocks))
        seen, self._seen = self._seen, status
        if status.num_steps > seen.num_steps:
            self._meter.observe("vlm_relay_decode_batch_sequences", status.last_batch_sequences)
        for name, count in (
            ("vlm_relay_generated_tokens_total", status.num_generated_tokens - seen.num_generated_tokens),
            ("vlm_relay_prompt_tokens_total", status.num_prompt_tokens - seen.num_prompt_tokens),
            ("vlm_relay_cached_prompt_tokens_total", status.num_cached_tokens - seen.num_cached_tokens),
            ("vlm_relay_preemptions_total", status.num_preemptions - seen.num_preemptions),
        ):
            if count > 0:
                self._meter.add(name, count)


def _options(decode: DecodeTable, device: str) -> EngineOptions:
    return EngineOptions(
        device=device,
        dtype=decode.dtype,
        weights=decode.weights,
        block_tokens=decode.block_tokens,
        kv_cache_bytes=decode.kv_cache_mib << 20,
        max_sequences=decode.max_sequences,
        max_step_tokens=decode.step_tokens,
        # The scheduler counts to max_waiting; what it has given up already may still be ending here.
        max_waiting=decode.max_waiting + decode.max_sequences,
        num_threads=decode.threads,
        step_limit_s=decode.step_limit_ms / 1000,
        graphs=decode.graphs,
        compile=decode.compile,
    )
