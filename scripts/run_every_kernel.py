# SPDX-License-Identifier: Apache-2.0
"""Launch every kernel on small inputs, in every way that changes what it reads or writes; for sanitizers, and as a first look at a GPU.

python scripts/run_every_kernel.py                       # all calls; prints JSON: launches of each kernel
python scripts/run_every_kernel.py --only "decode split"
python scripts/run_every_kernel.py --portable            # none of Hopper's kernels, tensors through pointers
python scripts/run_every_kernel.py --list

On the CPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1), in float16; Hopper's own need a Hopper GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from mala_hf import ops

LAUNCHERS = ("backward", "decode", "discover", "discover_probe", "forward", "key_plane_kernel")
HOPPER_LAUNCHERS = ("discover_hopper", "forward_hopper_launch")
FORWARD_ONLY, TRAINED = False, True


class Counted:
    """A kernel that counts its launches."""

    def __init__(self, kernel, name: str, counts: Counter):
        self.kernel, self.name, self.counts = kernel, name, counts

    def __getitem__(self, grid):
        self.counts[self.name] += 1
        return self.kernel[grid]

    def __getattr__(self, name: str):
        return getattr(self.kernel, name)


@contextmanager
def counted_launches() -> Iterator[Counter]:
    """Launches of each kernel inside the block, by its name."""
    from mala_hf.ops.launch_cache import CachedKernel
    from mala_hf.ops.tma import HAS_GLUON_FOR_HOPPER

    counts: Counter = Counter()
    names = LAUNCHERS + (HOPPER_LAUNCHERS if HAS_GLUON_FOR_HOPPER else ())
    modules = [importlib.import_module(f"mala_hf.ops.{name}") for name in names]
    kernels = [(x, name, kernel) for x in modules for name, kernel in vars(x).items() if name.endswith("_kernel")]
    launch = CachedKernel.launch

    def counted_launch(cached, *args) -> None:
        counts[getattr(cached.kernel, "fn", cached.kernel).__name__] += 1
        launch(cached, *args)

    try:
        CachedKernel.launch = counted_launch  # type: ignore[method-assign]
        for module, name, kernel in kernels:
            setattr(module, name, Counted(kernel, name, counts))
        yield counts
    finally:
        CachedKernel.launch = launch  # type: ignore[method-assign]
        for module, name, kernel in kernels:
            setattr(module, name, kernel)


def portable_only() -> None:
    """From here on calls run the kernels that every GPU has, and read their tensors through pointers."""
    for name in ("backward", "forward", "forward_hopper_launch", "discover"):
        try:
            module = importlib.import_module(f"mala_hf.ops.{name}")
        except ImportError:  # Hopper's needs a Triton that has Gluon
            continue
        for switch, value in (("has_tma", lambda x: False), ("HAS_GLUON_FOR_HOPPER", False)):
            if hasattr(module, switch):
                setattr(module, switch, value)


class Inputs:
    """Tensors of one device and dtype, for a seed the same in every run."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int = 0):
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(seed)

    def tensor(self, *shape: int) -> Tensor:
        """Normal numbers."""
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def qkv(self, seqlen_q: int, seqlen_k: int, heads: int = 4, head_dim: int = 64, batch: int = 2) -> list[Tensor]:
        """q, k, v; two query heads to a KV head. Half of the keys agree with the queries, so some tiles are skipped."""
        q, k, v = (
            self.tensor(batch, n, h, head_dim) for n, h in ((seqlen_q, heads), (seqlen_k, heads // 2), (seqlen_k, heads // 2))
        )  # fmt: skip
        q[..., 0] += 4
        k[:, seqlen_k // 2 :, :, 0] += 12
        return [q, k, v]

    def ints(self, *values: int) -> Tensor:
        """int32."""
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def public(
    seqlen_q: int = 200, seqlen_k: int = 200, train: bool = FORWARD_ONLY, head_dim: int = 64, **options
) -> Callable:
    """A call of ``mala_attn_func``; options that are functions are given the inputs."""

    def run(make: Inputs) -> list[Tensor]:
        q, k, v = make.qkv(seqlen_q, seqlen_k, head_dim=head_dim)
        given = {name: value(make) if callable(value) else value for name, value in options.items()}
        leaves = [x.requires_grad_(train) for x in (q, k, v)]
        result = ops.mala_attn_func(*leaves, **{"impl": "triton", "causal": True, "decode": "single", **given})
        out = result[0] if isinstance(result, tuple) else result
        return [out.detach(), *(torch.autograd.grad(out.sum(), leaves) if train else ())]

    return run


def packed(train: bool) -> Callable:
    """Sequences of 0, 70, 1 and 129 rows."""

    def run(make: Inputs) -> list[Tensor]:
        q, k, v = (x[0].requires_grad_(train) for x in make.qkv(200, 200, batch=1))
        boundaries = make.ints(0, 0, 70, 71, 200)
        out = ops.mala_attn_varlen_func(
            q, k, v, cu_seqlens_q=boundaries, cu_seqlens_k=boundaries, causal=True, impl="triton"
        )
        return [out.detach(), *(torch.autograd.grad(out.sum(), (q, k, v)) if train else ())]

    return run


def pages(form: str) -> Callable:
    """A decode over a cache in pages, after a write into it."""

    def run(make: Inputs) -> list[Tensor]:
        q, k, v = make.qkv(2, 2)
        caches = [make.tensor(9, 48, 2, 64) for _ in range(2)]
        table = make.ints(3, 1, 7, 2, 5, -1).view(2, 3)
        return [
            ops.mala_attn_with_kvcache_func(
                q, *caches, k, v, cache_seqlens=make.ints(120, 70), block_table=table, decode=form, impl="triton"
            )
        ]

    return run


def from_plane(return_work: bool) -> Callable:
    """A decode from the INT8 plane of a cache, after a write into both."""

    def run(make: Inputs) -> list[Tensor]:
        q, k, v = make.qkv(2, 2)
        caches = make.qkv(2, 300)[1:]
        plane = ops.quantize_keys(caches[0], impl="triton")
        found = ops.mala_attn_with_kvcache_func(
            q, *caches, k, v, cache_seqlens=make.ints(290, 70), key_plane=plane, impl="triton", return_work=return_work
        )
        return [found[0] if return_work else found, plane.scales[:, :, :72].contiguous()]

    return run


def launched(kernel: str, **overrides) -> Callable:
    """The forward or INT8 discovery launched as the public function would not: other loads, another kernel."""

    def run(make: Inputs) -> list[Tensor]:
        from mala_hf.ops.discover import launch_discover
        from mala_hf.ops.forward import launch_forward
        from mala_hf.ops.query_tile import Settings
        from mala_hf.ops.visibility import fixed_sequences

        q, k, v = make.qkv(200, 200)
        settings, sequences = Settings(1.0, 0.125, (-1, 0), 0.0, (64, 64)), fixed_sequences(2, 200, 200, 0)
        if kernel == "discover":
            launch_discover(q, k, settings, sequences, **overrides)
            return []
        if kernel == "look":
            from mala_hf.ops.discover_probe import sampled_counts

            return [sampled_counts(q, k, settings, sequences)]
        if overrides.get("walk"):
            support = launch_forward(q, k, v, settings, sequences, None, None, False, save_support=True)[4]
            return [launch_forward(q, k, v, settings, sequences, None, None, False, support=support)[0]]
        return [launch_forward(q, k, v, settings, sequences, None, None, False, **overrides)[0]]

    return run


def _mask(make: Inputs) -> Tensor:
    return (make.tensor(2, 4, 200, 200) > -0.5) | torch.eye(200, dtype=torch.bool, device=make.device)


LENGTHS = {
    "seqused_q": lambda make: make.ints(200, 150),
    "seqused_k": lambda make: make.ints(190, 150),
    "leftpad_k": lambda make: make.ints(0, 17),
}
CALLS: dict[str, Callable[[Inputs], list[Tensor]]] = {
    "forward": public(),
    "forward with its work": public(return_work=True),
    "forward, portable kernel": launched("forward", use_hopper=False),
    "forward, pointers": launched("forward", use_hopper=False, use_tma=False),
    "forward over a known support": launched("forward", walk=True),
    "forward, tiles too large for three per program on Hopper": public(head_dim=256),
    "forward without a vote": public(tau=0.0),
    "forward and backward": public(train=TRAINED, save_support=False),
    "forward and backward over its support": public(train=TRAINED, save_support=True),
    "odd head_dim": public(train=TRAINED, head_dim=72),
    "window, softcap and sinks": public(train=TRAINED, window=(90, 0), softcap=20.0, sinks=lambda make: make.tensor(4)),
    "mask": public(train=TRAINED, causal=False, mask=_mask),
    "padding": public(train=TRAINED, **LENGTHS),
    "packed": packed(FORWARD_ONLY),
    "packed, backward": packed(TRAINED),
    "more queries than keys": public(200, 70, train=TRAINED),
    "INT8 discovery": public(discovery="int8"),
    "INT8 discovery, portable kernel": launched("discover", use_hopper=False),
    "the look before INT8 discovery": launched("look"),
    "decode, two passes": public(1, 500, decode="two_pass"),
    "decode, two passes with their work": public(1, 500, decode="two_pass", return_work=True),
    "decode, two passes, many rows": public(60, 500, decode="two_pass", sinks=lambda make: make.tensor(4)),
    "decode, split": public(1, 500, decode="split"),
    "decode, splits without votes": public(1, 500, decode="split", tau=0.0),
    "decode, split with its work": public(5, 500, decode="split", return_work=True, window=(300, 0)),
    "decode from an INT8 plane": from_plane(False),
    "decode from an INT8 plane with its work": from_plane(True),
    "decode in pages, two passes": pages("two_pass"),
    "decode in pages, split": pages("split"),
}


def run_calls(names: list[str], device: str, dtype: torch.dtype) -> Counter:
    """Launches of each kernel. RuntimeError where a result is not finite."""
    with counted_launches() as counts:
        for name in names:
            for x in CALLS[name](Inputs(device, dtype)):
                if not x.isfinite().all():
                    raise RuntimeError(f"{name}: a result is not finite")
    return counts


def main() -> None:
    """Run the calls, print the launches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=CALLS, help="this call; may be given more than once")
    parser.add_argument("--portable", action="store_true", help="none of Hopper's kernels, tensors through pointers")
    parser.add_argument("--list", action="store_true", help="print the names of the calls and stop")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"))
    options = parser.parse_args()
    if options.list:
        print("\n".join(CALLS))
        return
    dtype = options.dtype or ("float16" if options.device == "cpu" else "bfloat16")
    names = options.only or list(CALLS)
    if dtype == "float32":  # INT8 discovery takes 16-bit inputs
        names = [name for name in names if not name.startswith("INT8")]
    if options.portable:
        portable_only()
    if os.environ.get("TRITON_INSTRUMENTATION_MODE"):  # what is compiled into the kernels keeps its notes there
        import triton

        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=options.device))
    counts = run_calls(names, options.device, getattr(torch, dtype))
    if options.device != "cpu":
        torch.cuda.synchronize()
    print(json.dumps({"calls": len(names), "dtype": dtype, "kernels": dict(sorted(counts.items()))}))


if __name__ == "__main__":
    main()
