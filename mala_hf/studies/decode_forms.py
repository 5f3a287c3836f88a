# SPDX-License-Identifier: Apache-2.0
"""Split and unsplit support in decode: what each form retains and omits, for new tokens at some places of a real sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..full_attention import LayerCall
from ..ops import mala_attn_func
from ..ops.work import SKIPPED
from .activations import observe
from .figures import spread

FORMS = (("single", 0), ("two_pass", 0), ("split", 4), ("split", 16))  # decode, num_splits


def decode_rows(
    model: Any, ids: Tensor, taus: Sequence[float], block_n: int, places: int, forms: Sequence[tuple[str, int]] = FORMS
) -> list[dict[str, Any]]:
    """Return a row for each tau and form: work, mean and P95 of omitted mass and output error over layers, heads and places.

    The new tokens are ``places`` evenly spread ones of the second half of ids (1, L); each sees all before it. "single" tests every
    query head alone, the others the query heads of a KV head together.
    """
    length = ids.shape[1]
    tokens = torch.linspace(length // 2, length - 1, places).long().tolist()
    keys = [(tau, form, splits) for tau in taus for form, splits in forms]
    found: dict[Any, dict[str, list[Tensor]]] = {
        key: {"slots": [], "visible": [], "omitted": [], "error": []} for key in keys
    }

    def observer(layer: int, call: LayerCall) -> None:
        for token in tokens:
            q, k, v = call.q[:, token : token + 1], call.k[:, : token + 1], call.v[:, : token + 1]
            p, full = _full(q, k, v, call.softmax_scale)
            for tau, form, splits in keys:
                out, work = mala_attn_func(
                    q, k, v, tau=tau, causal=True, softmax_scale=call.softmax_scale, tile=(1, block_n), decode=form,
                    num_splits=splits, impl="blockwise", return_work=True,
                )  # fmt: skip
                skipped = (work.tiles[0, :, 0] == SKIPPED).repeat_interleave(block_n, -1)[:, : token + 1]  # (H, N)
                of_key = found[tau, form, splits]
                of_key["slots"].append(work.key_slots_per_query[0])
                of_key["visible"].append(work.visible_slots_per_query[0])
                of_key["omitted"].append((p * skipped).sum(-1))
                of_key["error"].append((out[0, 0].float() - full).norm(dim=-1) / full.norm(dim=-1))

    observe(model, ids, observer)
    rows = []
    for (tau, form, splits), values in found.items():
        slots, visible = (torch.cat(values[name]).double().sum().item() for name in ("slots", "visible"))
        row = {"form": form, "splits": splits, "tau": tau, "work_fraction": slots / visible}
        for name, label in (("omitted", "omitted_mass"), ("error", "output_error")):
            row |= {f"{label}_{key}": value for key, value in spread(torch.cat(values[name])).items()}
        rows.append(row)
    return rows


def _full(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """Full attention of one token in float32: probabilities (H, N) and output (H, E)."""
    query, key, value = q[0, 0].float(), k[0].float(), v[0].float()  # (H, D), (N, K, D), (N, K, E)
    groups = query.shape[0] // key.shape[1]
    key, value = (x.transpose(0, 1).repeat_interleave(groups, 0) for x in (key, value))  # (H, N, ..)
    p = (softmax_scale * key @ query[..., None])[..., 0].softmax(-1)
    return p, (p[:, None] @ value)[:, 0]
