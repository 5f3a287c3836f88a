# SPDX-License-Identifier: Apache-2.0
"""Calls that ``ahead_of_time.py`` compiles: what each is, how it is made, and which kernels it launches."""

from __future__ import annotations

from dataclasses import dataclass

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
    # "prefill", "decode", one of DECODE_FORMS, "backward", "backward with support", "discover", "look", "walk"
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


def run(launch: Launch) -> None:
    """Make the call, on small tensors of the CPU."""
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
            if launch.phase == "discover":
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
                return_work=launch.features or launch.mask,
                save_support=launch.features or launch.mask,
                use_tma=launch.use_tma,
                use_hopper=launch.use_hopper,
                candidates=candidates,
            )


def kernels_of(launch: Launch) -> list[tuple[object, str]]:
    """What launches kernels in this call, modules or cached kernels, and the kernels' names there."""
    from mala import backward, forward

    if launch.phase.startswith("backward"):
        return [(getattr(backward, name), "kernel") for name in ("SUPPORT", "DELTA", "QUERY", "KEY")]
    if launch.phase.startswith("decode in"):
        from mala import decode, key_plane_kernel

        first = {"two_pass": ["score_tiles"], "int8_two_pass": ["score_plane"], "split": []}[DECODE_FORMS[launch.phase]]
        passes = [*first, "attend_retained"] if first else ["attend_split"]
        written = [(key_plane_kernel, "write_plane_kernel")] if first == ["score_plane"] else []
        return [*written, *((getattr(decode, name.upper()), "kernel") for name in (*passes, "combine"))]
    if launch.phase == "look":
        from mala import discover_probe

        return [(discover_probe, "sample_scores_kernel"), (discover_probe, "count_retained_kernel")]
    if launch.phase == "discover":
        from mala import discover

        prepare = [(discover, "quantize_keys_kernel"), (discover, "bound_rows_kernel")]
        if not launch.use_hopper:
            return [*prepare, (discover, "discover_kernel")]
        from mala import discover_hopper

        return [*prepare, (discover_hopper, "discover_hopper_kernel")]
    if launch.use_hopper:
        from mala import forward_hopper_launch

        return [(forward_hopper_launch.FORWARD_HOPPER, "kernel")]
    return [(forward.FORWARD, "kernel")]
