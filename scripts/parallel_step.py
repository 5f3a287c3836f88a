# SPDX-License-Identifier: Apache-2.0
"""One training step of a Llama-shaped stack of layers, tensor parallel, and where its time goes: attention, communication, the rest.

Attention: what the device does between q, k, v and the output of the attention function, forward and backward, from marks in its
queue. Communication: the time of the collectives in one profiled step; it holds the wait for the slowest process. The rest is what
the step takes beyond both: projections, MLPs, norms, optimizer.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from random_llama import RUN, VOCABULARY, peaked_llama
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModel
from transformers.distributed import DistributedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mala_hf import record_work
from mala_hf.bench.timing import mark

STEPS = 3
COMPARED = 1024  # last tokens


class Spans:
    """Pairs of marks around attention, forward and backward."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[Any] = []

    def add(self) -> None:
        """A mark at this place: the beginning and the end of a pair in turn."""
        self.marks.append(mark(self.device))

    def taken_ms(self) -> float:
        """Time between the marks of each pair, all together; forgets them."""
        total = sum(elapsed_ms(*pair) for pair in zip(self.marks[::2], self.marks[1::2], strict=True))
        self.marks.clear()
        return total


class _Mark(torch.autograd.Function):
    """The tensors themselves; a mark where forward and where backward passes."""

    @staticmethod
    def forward(ctx: Any, spans: Spans, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.spans = spans
        spans.add()
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.spans.add()
        return None, *gradients


@contextmanager
def marked_attention(name: str, spans: Spans) -> Iterator[None]:
    """Transformers' attention of this name with marks around it."""
    attention = ALL_ATTENTION_FUNCTIONS[name]

    def marked(module, query, key, value, attention_mask=None, **kwargs):
        query, key, value = _Mark.apply(spans, query, key, value)
        out, weights = attention(module, query, key, value, attention_mask, **kwargs)
        (out,) = _Mark.apply(spans, out)
        return out, weights

    ALL_ATTENTION_FUNCTIONS[name] = marked
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]  # what was registered shows again


def elapsed_ms(start: Any, end: Any) -> float:
    return 1e3 * (end - start) if isinstance(start, float) else start.elapsed_time(end)


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def communication_ms(profiled: profile, device: torch.device) -> float:
    """Time of all collectives: NCCL's kernels, or gloo's calls."""
    events = profiled.key_averages()
    if device.type == "cuda":
        return sum(e.self_device_time_total for e in events if "nccl" in e.key and "Kernel" in e.key) / 1e3
    return sum(e.cpu_time_total for e in events if e.key.startswith("gloo:")) / 1e3


def shared_model(shape: dict[str, int], layers: int, seqlen: int, device: torch.device) -> Any:
    """The stack without its head, each process with its share of every layer."""
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        if dist.get_rank() == 0:
            peaked_llama(layers, **shape, positions=seqlen, device=device).model.save_pretrained(own)
        dist.broadcast_object_list(folder)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = AutoModel.from_pretrained(folder[0], dtype=dtype, distributed_config=DistributedConfig(tp_plan="auto"))
        dist.barrier()
    return model.train()


def measure_step(name: str, model: Any, ids: Tensor, device: torch.device) -> tuple[dict[str, Any], Tensor]:
    """This process's times of a step with the attention ``name``, in ms, and the last hidden states."""
    model.set_attn_implementation(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, foreach=False)  # the same weights in every step
    generator = torch.Generator(device).manual_seed(1)
    shape = (1, ids.shape[1], model.config.hidden_size)
    gradient = torch.randn(shape, generator=generator, device=device, dtype=model.dtype)
    spans, last = Spans(device), []

    def step() -> float:
        start = mark(device)
        hidden = model(ids, use_cache=False).last_hidden_state
        hidden.backward(gradient)
        optimizer.step()
        optimizer.zero_grad()
        end = mark(device)
        finish(device)
        last[:] = [hidden[:, -COMPARED:].detach().float()]
        return elapsed_ms(start, end)

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with (
        marked_attention(name, spans),
        sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if device.type == "cuda" else nullcontext(),
    ):
        step()  # compiles
        spans.taken_ms()
        totals, attention = [], []
        for _ in range(STEPS):
            dist.barrier()
            totals.append(step())
            attention.append(spans.taken_ms())
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        with profile(activities=activities) as profiled:
            step()
    found = {
        "step_ms": statistics.median(totals),
        "attention_ms": statistics.median(attention),
        "communication_ms": communication_ms(profiled, device),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    }
    found["rest_ms"] = found["step_ms"] - found["attention_ms"] - found["communication_ms"]
    return found, last[0]


def measure_training_step(shape: dict[str, int], layers: int, seqlen: int, device: torch.device) -> dict[str, Any]:
    """The times of every process with "mala" and with "sdpa" (cuDNN on a GPU), the work of MALA, and how far their outputs differ."""
    model = shared_model(shape, layers, seqlen, device)
    tokens = torch.randint(VOCABULARY, (-(-seqlen // RUN),), generator=torch.Generator().manual_seed(1))
    ids = tokens.repeat_interleave(RUN)[None, :seqlen].to(device)
    row: dict[str, Any] = {"layers": layers, "hidden_size": model.config.hidden_size, "seqlen": seqlen, "by_rank": {}}
    outputs = {}
    for name in ("mala", "sdpa"):
        found, outputs[name] = measure_step(name, model, ids, device)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, found)
        row["by_rank"][name] = every
        row[name] = max(every, key=lambda one: one["step_ms"])
    row["step_speedup"] = row["sdpa"]["step_ms"] / row["mala"]["step_ms"]
    row["difference"] = ((outputs["mala"] - outputs["sdpa"]).norm() / outputs["sdpa"].norm()).item()
    model.set_attn_implementation("mala")
    with torch.no_grad(), record_work(model) as work:
        model(ids, use_cache=False)
    row["work_fraction"] = work.gathered().work_fraction
    return row
