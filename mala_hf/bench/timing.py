# SPDX-License-Identifier: Apache-2.0
"""Times of a call: on the device, without what the host does to start it; and eagerly, with it.

A device time comes from a CUDA graph that holds many calls, so that the graph's own launch is no part of it. The calls go round
over copies of their inputs that together exceed the L2 cache: a call finds its inputs as cold as they are in a model.
On the CPU both are times of the same loop.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], Any]

CALLS_IN_GRAPH = 20  # of a short call; a long one is captured fewer times
GRAPH_MS = 20.0  # of device time that a graph need not exceed for its launch to vanish
CACHES = 4  # that the read bytes of all copies together fill
LAPS = (5, 300)  # fewest and most replays that a median is taken of


def copies_for_cold_reads(read_bytes: int, device: torch.device) -> int:
    """Copies of inputs of so many bytes that together exceed the L2 cache four times; 1 on the CPU."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, math.ceil(CACHES * cache / max(read_bytes, 1)))


def device_times(
    calls: Sequence[Call], device: torch.device, budget_ms: float, stream: torch.cuda.Stream | None = None
) -> dict[str, float]:
    """Median, 10th and 90th percentile over replays of a call's device time, in ms, and the calls of a replay.

    calls: the same call on each copy of its inputs. budget_ms: device time to spend. stream: to capture on (default: a new one).
    """
    if device.type != "cuda":
        return eager_times(calls, device, budget_ms)
    one_ms = min(laps(calls[0], device, 2))
    wanted = min(CALLS_IN_GRAPH, max(1, math.ceil(GRAPH_MS / one_ms)))
    rounds = math.ceil(wanted / len(calls))  # whole rounds: a replay begins with what the one before used longest ago
    graph = captured([*calls] * rounds, stream)
    times = per_call(graph.replay, len(calls) * rounds, device, budget_ms)
    del graph
    return times


def eager_times(calls: Sequence[Call], device: torch.device, budget_ms: float) -> dict[str, float]:
    """The same of calls that the host starts one by one, without waiting for them."""

    def run() -> None:
        for call in calls:
            call()

    return per_call(run, len(calls), device, budget_ms)


def per_call(run: Call, calls: int, device: torch.device, budget_ms: float) -> dict[str, float]:
    """Percentiles over laps of ``run``, which makes so many calls, divided by their number."""
    fewest, most = LAPS
    one_ms = min(laps(run, device, 2))
    times = torch.tensor(laps(run, device, min(most, max(fewest, int(budget_ms / one_ms))))) / calls
    low, median, high = times.quantile(torch.tensor([0.1, 0.5, 0.9])).tolist()
    return {"median_ms": median, "p10_ms": low, "p90_ms": high, "calls": calls}


def laps(run: Call, device: torch.device, count: int) -> list[float]:
    """Milliseconds of ``count`` runs, one after another without a gap, after one that is not counted."""
    run()
    marks = [mark(device)]
    for _ in range(count):
        run()
        marks.append(mark(device))
    if device.type != "cuda":
        return [1e3 * (end - start) for start, end in itertools.pairwise(marks)]
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in itertools.pairwise(marks)]


def mark(device: torch.device) -> Any:
    """This place in the device's queue, or the time on the CPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def captured(calls: Sequence[Call], stream: torch.cuda.Stream | None = None) -> torch.cuda.CUDAGraph:
    """All calls, one after another, as one CUDA graph."""
    stream = torch.cuda.Stream() if stream is None else stream
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for call in dict.fromkeys(calls):  # whatever is done once only
            call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
    torch.cuda.synchronize()
    return graph


def peak_bytes(run: Call, device: torch.device) -> int | None:
    """Device memory that ``run`` allocates on top of what is there; ``None`` on the CPU, where torch does not count."""
    if device.type != "cuda":
        run()
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
