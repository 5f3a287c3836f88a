# SPDX-License-Identifier: Apache-2.0
"""Compiles what a launch would compile for a GPU that is not here: ``python ahead_of_time.py`` reads launches, prints findings.

The package's own launcher runs up to the kernel call, on small CPU tensors, with a driver that only names the target. It has to be
a process of its own: under TRITON_INTERPRET, which the other tests need, triton compiles nothing.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

# the folder that holds the package "mala": kernels need no transformers
KERNELS = Path(__file__).parents[1] / "kernels_hub" / "mala" / "torch-ext"


DECODE_FORMS = {
    "decode in two passes": "two_pass",
    "decode in two passes from int8": "int8_two_pass",
    "decode in splits": "split",
}


@dataclass(frozen=True)
class Launch:
    """One call on one target ("cuda:80", "cuda:90", "hip:gfx942"), once for each of ``seqlens_k`` and ``taus``."""

    target: str
    head_dim: int
    dtype: str = "bfloat16"
    # "prefill", "decode", one of DECODE_FORMS, "backward", "backward with support", "discover", "discover wide", "look", "walk"
    phase: str = "prefill"
    use_tma: bool = False
    use_hopper: bool = False
    v_head_dim: int = -1  # -1: head_dim
    features: bool = False  # window, softcap, sinks, lengths (not on Hopper) and returned work, besides causal
    mask: bool = False
    num_heads: int = 4
    num_kv_heads: int = 2
    seqlens_k: tuple[int, ...] = (512,)
    taus: tuple[float, ...] = (1.0,)
    tile: tuple[int, int] | None = None  # None: the shipped one

    @property
    def id(self) -> str:
        return "-".join(
            [self.target, self.phase.replace(" ", "_"), self.dtype, f"D{self.head_dim}"]
            + [f"DV{self.v_head_dim}"] * (self.v_head_dim > 0)
            + ["tma"] * self.use_tma
            + ["hopper"] * self.use_hopper
            + ["features"] * self.features
            + ["mask"] * self.mask
        )


@dataclass(frozen=True)
class Finding:
    """What one compiled kernel takes. ``spilled_bytes`` per thread and ``registers`` are None where the tool is not at hand.

    ``is_serialised``: its assembler found a matrix product whose numbers are read before it must have ended, and made each wait for the
    one before: nothing runs beside a product then.
    """

    kernel: str
    shared_bytes: int
    num_warps: int
    registers: int | None = None
    spilled_bytes: int | None = None
    is_serialised: bool = False


def findings(launches: list[Launch], compile_kernels: bool = True) -> list[list[dict]]:
    """Per launch, the kernels that were compiled, or with ``compile_kernels`` False the distinct ones that would have been."""
    command = [sys.executable, __file__, "compile" if compile_kernels else "count"]
    request = json.dumps([asdict(launch) for launch in launches])
    done = subprocess.run(command, input=request, capture_output=True, text=True, env=_environment(), check=False)
    if done.returncode:
        raise RuntimeError(done.stdout[-3000:] + done.stderr[-6000:])
    return json.loads(done.stdout.splitlines()[-1])


def _environment() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, [str(KERNELS), os.environ.get("PYTHONPATH")]))  # another Triton may lie on it
    return environment | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


class _NamedTarget:
    """A triton driver that can be compiled for, and nothing else."""

    def __init__(self, name: str):
        from triton.backends.compiler import GPUTarget

        backend, arch = name.split(":")
        self._target = GPUTarget(backend, int(arch) if backend == "cuda" else arch, 32 if backend == "cuda" else 64)

    def get_current_target(self):
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _Warmup:
    """Stands in for a kernel: launching it compiles it and adds what came out to ``compiled``."""

    def __init__(self, kernel, compiled: list):
        self.kernel, self.compiled = kernel, compiled

    def __getitem__(self, grid):
        def compile_for(*args, **kwargs) -> None:
            with contextlib.redirect_stdout(io.StringIO()) as log:  # the assembler's
                kernel = self.kernel.warmup(*args, grid=grid, **kwargs)
            self.compiled.append((kernel, "wgmma.mma_async instructions are serialized" in log.getvalue()))

        return compile_for


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of stack per thread (which is where spilled registers go)."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return int(re.search(r"REG:(\d+)", text)[1]), int(re.search(r"STACK:(\d+)", text)[1])


def _found(kernel, is_serialised: bool) -> Finding:
    cubin, name = kernel.asm.get("cubin"), kernel.metadata.name
    if cubin is not None:
        return Finding(name, kernel.metadata.shared, kernel.metadata.num_warps, *_resources(cubin), is_serialised)
    assembly = kernel.asm["amdgcn"]
    scratch = re.search(r"ScratchSize: (\d+)", assembly)
    registers = re.search(r"NumVgprs: (\d+)", assembly)
    return Finding(
        name,
        kernel.metadata.shared,
        kernel.metadata.num_warps,
        int(registers[1]) if registers else None,
        int(scratch[1]) if scratch else None,
    )


def _run(launch: Launch) -> None:
    import torch
    from mala import backward, decode, discover, discover_probe, forward
    from mala.blockwise import Settings
    from mala.key_plane import KeyPlane
    from mala.key_plane_kernel import launch_write_plane
    from mala.support_bits import empty_support
    from mala.tile_config import decode_launch, tile_config
    from mala.visibility import fixed_sequences

    dtype = getattr(torch, launch.dtype)
    v_head_dim = launch.head_dim if launch.v_head_dim < 0 else launch.v_head_dim
    seqlen_q = 1 if launch.phase.startswith("decode") else 512
    for seqlen_k in launch.seqlens_k:
        for tau in launch.taus:
            q = torch.empty(2, seqlen_q, launch.num_heads, launch.head_dim, dtype=dtype)
            k = torch.empty(2, seqlen_k, launch.num_kv_heads, launch.head_dim, dtype=dtype)
            v = torch.empty(2, seqlen_k, launch.num_kv_heads, v_head_dim, dtype=dtype)
            tile = launch.tile or tile_config(launch.head_dim, v_head_dim, dtype, seqlen_q).tile
            window, softcap = ((300, 0), 30.0) if launch.features else ((-1, 0), 0.0)
            lengths = {"seqused_k": torch.tensor([seqlen_k, 1])} if launch.features and not launch.use_hopper else {}
            settings = Settings(tau, launch.head_dim**-0.5, window, softcap, tile)
            sequences = fixed_sequences(2, seqlen_q, seqlen_k, 0, **lengths)
            sinks = torch.zeros(launch.num_heads) if launch.features else None
            mask = torch.ones(2, 1, seqlen_q, seqlen_k, dtype=torch.bool) if launch.mask else None
            if launch.phase.startswith("backward"):
                saved = launch.phase == "backward with support"
                support = (
                    empty_support(sequences.num_sequences, launch.num_heads, sequences.tile_grid(tile), q.device)
                    if saved
                    else None
                )
                out = torch.empty(*q.shape[:3], v_head_dim, dtype=dtype)
                lse = torch.empty(2, launch.num_heads, seqlen_q)
                backward.launch_backward(
                    q, k, v, out, lse, out, settings, sequences, sinks, mask, support, use_tma=launch.use_tma
                )
                continue
            if launch.phase.startswith("decode in"):
                tile = 1, decode_launch(launch.head_dim, v_head_dim, dtype).block_n
                settings = Settings(tau, launch.head_dim**-0.5, window, softcap, tile)
                form = DECODE_FORMS[launch.phase]
                plane = None
                if form == "int8_two_pass":
                    plane = KeyPlane.empty(2, launch.num_kv_heads, seqlen_k, launch.head_dim)
                    launch_write_plane(k, plane, torch.zeros(2, dtype=torch.int32) if launch.features else 0)
                table = torch.zeros(2, 64, dtype=torch.int32) if launch.features and plane is None else None
                decode.launch_decode(
                    q,
                    k,
                    v,
                    settings,
                    sequences,
                    sinks,
                    form,
                    return_work=launch.features,
                    block_table=table,
                    key_plane=plane,
                )
                continue
            if launch.phase == "look":
                discover_probe.sampled_counts(q, k, settings, sequences)
                continue
            if launch.phase.startswith("discover"):
                discover.IS_WIDE = launch.phase == "discover wide"
                discover.launch_discover(q, k, settings, sequences, use_hopper=launch.use_hopper)
                continue
            candidates = None
            if launch.phase == "walk":
                candidates = empty_support(2, launch.num_heads, sequences.tile_grid(tile), q.device)
            forward.launch_forward(
                q,
                k,
                v,
                settings,
                sequences,
                sinks,
                mask,
                return_work=(launch.features or launch.mask) and candidates is None,
                save_support=launch.features or launch.mask,
                use_tma=launch.use_tma,
                use_hopper=launch.use_hopper,
                candidates=candidates,
            )


def _kernels_of(launch: Launch) -> list[tuple[object, str]]:
    """What launches kernels in this call, modules or cached kernels, and the kernels' names there."""
    from mala import backward, forward

    if launch.phase.startswith("backward"):
        return [(backward, f"backward_{name}_kernel") for name in ("support", "delta", "query", "key")]
    if launch.phase.startswith("decode in"):
        from mala import decode, key_plane_kernel

        first = {"two_pass": ["score_tiles"], "int8_two_pass": ["score_plane"], "split": []}[DECODE_FORMS[launch.phase]]
        passes = [*first, "attend_retained"] if first else ["attend_split"]
        written = [(key_plane_kernel, "write_plane_kernel")] if first == ["score_plane"] else []
        return [*written, *((getattr(decode, name.upper()), "kernel") for name in (*passes, "combine"))]
    if launch.phase == "look":
        from mala import discover_probe

        return [(discover_probe, "sample_scores_kernel"), (discover_probe, "count_retained_kernel")]
    if launch.phase.startswith("discover"):
        from mala import discover

        prepare = [(discover, "quantize_keys_kernel"), (discover, "bound_rows_kernel")]
        if not launch.use_hopper:
            return [*prepare, (discover, "discover_kernel")]
        from mala import discover_hopper, discover_hopper_wide

        if launch.phase == "discover wide":
            return [*prepare, (discover_hopper_wide, "discover_hopper_wide_kernel")]
        return [*prepare, (discover_hopper, "discover_hopper_kernel")]
    if launch.use_hopper:
        from mala import forward_hopper_launch

        return [(forward_hopper_launch, "mala_forward_hopper_kernel")]
    return [(forward, "mala_forward_kernel")]


def main(mode: str) -> None:
    """Launches as JSON on stdin; per launch a list of findings (or of distinct specialisations) as JSON on stdout."""
    import torch
    import triton
    from mala import backward, decode, forward

    torch.cuda.device = contextlib.nullcontext  # tensors are on the CPU
    triton.knobs.nvidia.dump_ptxas_log = triton.knobs.compilation.always_compile = True  # no log comes from a cache
    answers = []
    for request in json.load(sys.stdin):
        request |= {"seqlens_k": tuple(request["seqlens_k"]), "taus": tuple(request["taus"])}
        request["tile"] = request["tile"] and tuple(request["tile"])
        launch = Launch(**request)
        triton.runtime.driver.set_active(_NamedTarget(launch.target))
        backend, arch = launch.target.split(":")
        capability = divmod(int(arch), 10) if backend == "cuda" else (0, 0)
        forward.nvidia_major = backward.nvidia_major = decode.nvidia_major = lambda device, major=capability[0]: major
        forward.nvidia_capability = backward.nvidia_capability = lambda device, capability=capability: capability
        originals = [(module, name, getattr(module, name)) for module, name in _kernels_of(launch)]
        keys: dict[str, None] = {}
        if mode == "count":

            def note(*, key: str, keys: dict = keys, **_) -> bool:
                keys[key] = None
                return True  # no need to compile

            triton.knobs.runtime.jit_cache_hook = note
        compiled: list = []
        for module, name, kernel in originals:
            kernel.device_caches.clear()
            setattr(module, name, _Warmup(kernel, compiled))
        _run(launch)
        for module, name, kernel in originals:
            setattr(module, name, kernel)
        answers.append(list(keys) if mode == "count" else [asdict(_found(*kernel)) for kernel in compiled])
    print(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
