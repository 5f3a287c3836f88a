# SPDX-License-Identifier: Apache-2.0
"""FLOPs against a hand count, the matrix products that the rule's definition and models execute, and the kernels' own counts."""

import pytest
import torch
from backward_calls import gradient_of, run_backward, run_forward, unpacked, with_tile
from calls import build, heads
from helpers import numbers_of, of_head, operands
from inputs import Case
from models import tiny, tokens
from torch.utils.flop_counter import FlopCounterMode

from mala_hf import flops
from mala_hf.flops import AttentionFlops, ModelShape, attention_flops
from mala_hf.ops.reference import backward_head, forward_head

# whole tiles, so that a slot is a pair that is computed
CASE = Case(
    seqlen_q=96, seqlen_k=96, num_heads=4, num_kv_heads=2, head_dim=32, v_head_dim=16, tile=(16, 16), family="peaked"
)


def executed(function, *arguments, **options):
    """FLOPs of the matrix products that a function executes, by torch's own counter, and what it returns."""
    with FlopCounterMode(display=False) as counter:
        found = function(*arguments, **options)
    return counter.get_total_flops(), found


def test_a_hand_count():
    # 4 rows, tiles of 2 x 2: tiles (0, 0), (1, 1), (1, 0); rows see 2, 2, 4, 4 slots; one tile skipped leaves 2, 2, 2, 2
    assert flops.causal_slots(4, (2, 2)) == 12
    assert flops.causal_slots(4) == 1 + 2 + 3 + 4
    assert flops.causal_slots(5, (2, 4)) == 2 * 4 + 2 * 4 + 1 * 8
    found = attention_flops(12, 8, 3, 5, backward_slots=4)
    assert found == AttentionFlops(12 * 2 * 3, 8 * 2 * 5, 12 * 2 * 3, 4 * (2 * 5 + 2 * 5 + 2 * 3 + 2 * 3))
    assert found.total == found.forward + found.backward == 72 + 80 + 72 + 128
    saved = attention_flops(12, 8, 3, 5, backward_slots=4, saves_support=True)
    assert saved.discovery_backward == 8 * 2 * 3
    assert attention_flops(12, 12, 3).backward == 0
    assert (found + saved).total == found.total + saved.total


@pytest.mark.parametrize("slots", [(12, 13, None), (12, 8, 9), (12, -1, None)])
def test_slots_that_cannot_be_are_refused(slots):
    with pytest.raises(ValueError, match="backward <= forward <= visible"):
        attention_flops(*slots[:2], 8, backward_slots=slots[2])


def test_the_counts_of_the_kernels_are_the_flops_that_the_rule_executes(device):
    call = with_tile(build(CASE, torch.float32, device))
    _, work = call.run("triton", return_work=True)
    forward = run_forward(call)
    do = gradient_of(call)
    support = run_backward(call, forward, do).support  # state-only
    k_tiles = CASE.seqlen_k // CASE.tile[1]
    backward_slots = unpacked(support, k_tiles).sum().item() * CASE.tile[0] * CASE.tile[1]

    forward_flops = backward_flops = score_flops = 0
    for head in heads(call):
        q, k, v = operands(call, head, torch.float32)
        numbers = numbers_of(call)
        score_flops += executed(torch.matmul, q, k.T)[0]
        count, result = executed(forward_head, q, k, v, head.legal, **numbers)
        forward_flops += count
        arguments = q, k, v, head.legal, result.out, result.lse, of_head(do, call, head)
        backward_flops += executed(backward_head, *arguments, **numbers)[0]

    retained, visible = flops.retained_slots(work), flops.visible_slots(work)
    assert backward_slots <= retained < visible == 4 * flops.causal_slots(96, (16, 16))
    found = attention_flops(visible, retained, 32, 16, backward_slots=backward_slots)
    # the definition computes the scores of pairs that no row may see, too
    assert found.discovery_forward == score_flops * visible / (4 * 96 * 96)
    assert found.post_score_forward == forward_flops - score_flops
    assert found.post_score_backward == backward_flops - score_flops


@pytest.mark.transformers
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_a_models_flops_are_those_that_it_executes(family):
    model, length = tiny(family, attention="eager"), 24
    shape = ModelShape.of(model.config)
    pairs = shape.num_layers * shape.num_heads * length * length  # eager attention computes every pair

    def step():
        model(tokens(2, length), use_cache=False).logits.sum().backward()

    # the oldest Transformers makes the angles of the rotary embedding, a table for all layers, as a matrix product
    angles, _ = executed(model.model.rotary_emb, torch.zeros(1, length, 1), torch.arange(length)[None])
    forward, whole = (executed(run)[0] - angles for run in (lambda: model(tokens(2, length), use_cache=False), step))
    full = attention_flops(2 * pairs, 2 * pairs, shape.head_dim, backward_slots=2 * pairs)
    assert forward == shape.forward_flops(2 * length, full)
    # torch keeps the probabilities, so its backward computes no scores again
    assert whole == shape.training_flops(2 * length, full) - full.discovery_backward


@pytest.mark.transformers
def test_a_model_with_experts_is_refused():
    with pytest.raises(ValueError, match="qwen3_moe"):
        ModelShape.of(tiny("qwen3_moe").config)


def test_visible_slots_of_all_layers():
    shape = ModelShape(8, 16, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=4, vocab_size=10)
    assert shape.causal_slots(4, (2, 2)) == 3 * 2 * 12
    assert shape.linear_flops_per_token == 2 * (3 * (8 * 4 * 2 * 3 + 3 * 8 * 16) + 80)
