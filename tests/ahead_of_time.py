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

from launches import Launch, kernels_of, run

# the folder that holds the package "mala": kernels need no transformers
KERNELS = Path(__file__).parents[1] / "kernels_hub" / "mala" / "torch-ext"

WAIT, ENDS = "griddepcontrol.wait", re.compile(r"^(?:@!?%p\d+ )?(?:ret|exit)\b")  # in PTX


@dataclass(frozen=True)
class Finding:
    """What one compiled kernel takes. ``spilled_bytes`` per thread and ``registers`` are None where the tool is not at hand.

    ``is_serialised``: its assembler found a matrix product whose numbers are read before it must have ended, and made each wait for the
    one before: nothing runs beside a product then. ``open_barriers``: barriers in shared memory that are begun and never ended, so that
    their memory may be given to something else while they are in use. ``waits``: it waits for the kernel before, which may still run.
    ``may_not_wait``: a program may leave without; if all do, what follows runs beside that kernel.
    """

    kernel: str
    shared_bytes: int
    num_warps: int
    registers: int | None = None
    spilled_bytes: int | None = None
    is_serialised: bool = False
    open_barriers: int = 0
    waits: bool = False
    may_not_wait: bool = False


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


def may_not_wait(ptx: str) -> bool:
    """Whether the end of a kernel that waits for the one before can be reached without the wait."""
    lines = [line.strip() for line in ptx.splitlines()]
    if not any(line.startswith(WAIT) for line in lines):
        return False
    labels = {found[1]: at for at, line in enumerate(lines) if (found := re.match(r"(\$\w+):", line))}
    seen, ahead = set(), [lines.index("{")]
    while ahead:
        at = ahead.pop()
        if at in seen or lines[at].startswith(WAIT):
            continue
        seen.add(at)
        if ENDS.search(lines[at]):
            return True
        jump = re.search(r"\bbra(?:\.uni)?\s+(\S+);", lines[at])
        if jump:
            ahead.append(labels[jump[1]])
        if not jump or lines[at].startswith("@"):
            ahead.append(at + 1)
    return False


def _found(kernel, is_serialised: bool) -> Finding:
    cubin, name = kernel.asm.get("cubin"), kernel.metadata.name
    if cubin is not None:
        ptx = kernel.asm["ptx"]
        begun, ended = (ptx.count(f"mbarrier.{end}") for end in ("init", "inval"))
        shape = kernel.metadata.shared, kernel.metadata.num_warps
        return Finding(name, *shape, *_resources(cubin), is_serialised, begun - ended, WAIT in ptx, may_not_wait(ptx))
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
        originals = [(module, name, getattr(module, name)) for module, name in kernels_of(launch)]
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
        run(launch)
        for module, name, kernel in originals:
            setattr(module, name, kernel)
        answers.append(list(keys) if mode == "count" else [asdict(_found(*kernel)) for kernel in compiled])
    print(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
