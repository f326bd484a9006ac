"""Tries how embeddings come from GPU to GPU before a server starts, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping

from pydantic import ValidationError

from python_backend.transport.placing import gpu_index
from scheduler.plan import Plan, Transfer
from scheduler.transfers import describe_transfer, pairs, with_transfers

TIMEOUT_S = 180.0


class ProbeRefused(RuntimeError):
    """The GPUs of a plan cannot be used; the message says why."""


def measure(plan: Plan, variables: Mapping[str, str], say: Callable[[str], None]) -> Plan:
    """The plan with every pair of an encoder's and a decoder's GPU tried and timed; unchanged without GPUs.

    Raises:
        ProbeRefused: no driver, or no such GPU.
    """
    transfers = [_try(encoder, decoder, variables) for encoder, decoder in pairs(plan)]
    for transfer in transfers:
        say(describe_transfer(transfer))
    return with_transfers(plan, transfers) if transfers else plan


def _try(encoder: str, decoder: str, variables: Mapping[str, str]) -> Transfer:
    command = [sys.executable, "-m", "python_backend.transport", "probe"]
    command += [str(gpu_index(encoder)), str(gpu_index(decoder))]
    try:
        done = subprocess.run(
            command, env=dict(variables), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        return Transfer.model_validate_json(done.stdout)
    except subprocess.TimeoutExpired as error:
        raise ProbeRefused(f"{encoder} to {decoder}: a copy did not end in {TIMEOUT_S:g} s") from error
    except ValidationError as error:
        last = (done.stderr.strip().splitlines() or [f"the probe ended with {done.returncode}"])[-1]
        raise ProbeRefused(f"{encoder} to {decoder}: {last}") from error
