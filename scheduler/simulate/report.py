"""A run for a person and for a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from scheduler.pools import place_of
from scheduler.simulate.outcome import Figures, Limits, Quantiles, figures
from scheduler.simulate.run import Run


def to_dict(run: Run, limits: Limits, warm_up: float) -> dict[str, object]:
    """Plain values, for JSON."""
    told = figures(run.outcomes, limits, warm_up)
    samples = run.samples
    return {
        "figures": asdict(told),
        "limits": asdict(limits),
        "warm_up": warm_up,
        "duration_s": run.duration_s,
        "offered_per_s": run.workload.rate_per_s or None,
        "devices": run.device_busy,
        "replicas": {
            "busy": run.busy,
            "mean_queue": _mean_queues(run),
            "encode_batches": run.num_batches,
            "decode_steps": run.num_steps,
        },
        "images": {"encoded": run.num_encoded, "cached": run.num_cached},
        "link_bytes": run.tally.link_bytes,
        "decisions": {"by_reason": run.tally.reasons, "by_mode": run.tally.modes},
        "retries": run.tally.num_retries,
        "preemptions": run.num_preemptions,
        "samples": {"time_s": samples.time_s, "waiting": samples.waiting, "in_flight": samples.in_flight},
    }


def text(run: Run, limits: Limits, warm_up: float) -> str:
    """Tables: what clients saw, what devices did, what was decided."""
    told = figures(run.outcomes, limits, warm_up)
    sections = [_clients(run, told, limits), _devices(run), _decisions(run)]
    return "\n\n".join("\n".join(lines) for lines in sections)


def _clients(run: Run, told: Figures, limits: Limits) -> list[str]:
    ends = ", ".join(f"{count} {name}" for name, count in told.num_by_outcome.items())
    rate = run.workload.rate_per_s
    users = f"{run.workload.num_users} users" if run.workload.num_users else "all at once"
    offered = f"{rate:.4g} requests/s offered" if rate else users
    rows = [
        ["", "mean", "P50", "P90", "P99"],
        ["time to first token", *_times(told.ttft_s)],
        ["time per further token", *_times(told.tpot_s)],
        ["whole answer", *_times(told.latency_s)],
    ]
    return [
        f"{offered}: {ends}, the warm-up left out",
        f"throughput {told.requests_per_s:.4g} requests/s, {told.tokens_per_s:.4g} tokens/s",
        f"goodput {told.goodput_per_s:.4g} requests/s: {told.attainment:.1%} of all had the first token within "
        f"{limits.ttft_s:g} s and the others within {limits.tpot_s * 1000:g} ms each at the mean",
        "",
        *table(rows),
    ]


def _devices(run: Run) -> list[str]:
    queues = _mean_queues(run)
    rows = [["DEVICE", "ENCODING", "DECODING", "BUSY", "WAITING TO ENCODE", "TO DECODE", "RUNNING"]]
    for device, stages in run.device_busy.items():
        encoders = [each.name for each in run.plan.encoders if place_of(each) == device]
        decoders = [each.name for each in run.plan.decoders if place_of(each) == device]
        rows.append(
            [
                device,
                f"{stages['encode']:.1%}" if "encode" in stages else "-",
                f"{stages['decode']:.1%}" if "decode" in stages else "-",
                f"{sum(stages.values()):.1%}",
                f"{sum(queues[name]['waiting'] for name in encoders):.2f}" if encoders else "-",
                f"{sum(queues[name]['waiting'] for name in decoders):.2f}" if decoders else "-",
                f"{sum(queues[name]['running'] for name in decoders):.2f}" if decoders else "-",
            ]
        )
    waiting = run.samples.waiting
    front = f"waiting to be admitted: {np.mean(waiting):.2f} at the mean, {max(waiting)} at most" if waiting else ""
    return [*table(rows), front]


def _decisions(run: Run) -> list[str]:
    tally = run.tally
    lines = [
        f"decisions: {_counts(tally.modes)}; by reason {_counts(tally.reasons)}",
        f"images: {run.num_encoded} encoded, {run.num_cached} found in a cache",
    ]
    if tally.link_bytes:
        moved = ", ".join(f"{name} {size / 1e9:.3g} GB" for name, size in sorted(tally.link_bytes.items()))
        lines.append(f"embeddings over links: {moved}")
    if tally.num_retries or run.num_preemptions:
        lines.append(f"{tally.num_retries} tried again after a death, {run.num_preemptions} preempted in a decoder")
    return lines


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda each: -each[1])) or "none"


def _mean_queues(run: Run) -> dict[str, dict[str, float]]:
    """By replica: what arriving requests found there at the mean."""
    samples, found = run.samples, {}
    for index, encoder in enumerate(run.plan.encoders):
        found[encoder.name] = {"waiting": float(np.mean([row[index] for row in samples.encoder_queue]))}
    for index, decoder in enumerate(run.plan.decoders):
        found[decoder.name] = {
            "waiting": float(np.mean([row[index] for row in samples.decoder_waiting])),
            "running": float(np.mean([row[index] for row in samples.decoder_running])),
        }
    return found


def _times(values: Quantiles) -> list[str]:
    return [duration(value) for value in (values.mean, values.p50, values.p90, values.p99)]


def duration(seconds: float) -> str:
    """Three digits, in s or ms."""
    if np.isnan(seconds):
        return "-"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns aligned: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
