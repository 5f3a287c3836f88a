# SPDX-License-Identifier: Apache-2.0
"""Settings of single layers and heads: heads with equal ones compute what a layer of them alone would, whatever their neighbours do."""

from __future__ import annotations

import itertools

import pytest
import torch
from models import NOISE, SMALL_TILE, attention, padding, tiny, tokens, work_of
from torch.testing import assert_close

import mala_hf
from mala_hf import MalaConfig, patch_model
from mala_hf.ops import hf
from mala_hf.ops.hf_heads import head_groups
from mala_hf.ops.hf_settings import HeadSettings, LayerSettings

pytestmark = pytest.mark.transformers

NUM_HEADS, NUM_KV_HEADS, LENGTH, HEAD_DIM = 8, 2, 32, 8

MIXED = {"0-1": 8.0, 3: "sdpa", "5-6": {"tau": 0, "window": 5}, -1: {"window": 3}}
OF_HEAD = [8.0, 8.0, None, "sdpa", None, {"tau": 0, "window": 5}, {"tau": 0, "window": 5}, {"window": 3}]


class Layer(torch.nn.Module):
    """What an attention layer shows of itself; its settings are those of layer 0."""

    def __init__(self, setting, tau: float = 1.0):
        super().__init__()
        self.layer_idx = 0
        self.is_causal = True
        mala = {"tau": tau, "tile": SMALL_TILE} | ({} if setting is None else {"layers": {"0": setting}})
        self.config = type("Config", (), {"mala": mala, "num_hidden_layers": 1, "num_attention_heads": NUM_HEADS})()


def inputs(batch: int = 2, rows: int = LENGTH) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (NUM_HEADS, rows), (NUM_KV_HEADS, LENGTH), (NUM_KV_HEADS, LENGTH)
    return [3 * torch.randn(batch, *shape, HEAD_DIM, generator=generator) for shape in shapes]


def mask_of(kind: str, rows: int) -> torch.Tensor | None:
    if kind == "padded":
        return padding(LENGTH, (5, LENGTH), (0, LENGTH)).bool()
    if kind == "square":
        allowed = torch.rand(2, 1, rows, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.6
        return allowed & torch.ones(rows, LENGTH, dtype=torch.bool).tril(LENGTH - rows)
    if kind == "square by head":
        return (
            mask_of("square", rows).repeat(1, NUM_HEADS, 1, 1)
            & torch.ones(NUM_HEADS, 1, LENGTH).bernoulli(0.8, generator=torch.Generator().manual_seed(2)).bool()
        )
    return None


PACKED = {name: torch.tensor([0, 7, 8, LENGTH], dtype=torch.int32) for name in ("cu_seq_lens_q", "cu_seq_lens_k")}


@pytest.mark.parametrize(
    "kind", ["plain", "window", "padded", "square", "square by head", "packed", "sinks and softcap"]
)
@pytest.mark.parametrize("rows", [LENGTH, 6, 1])
def test_heads_do_what_a_layer_of_them_alone_does(kind, rows):
    if kind == "packed" and rows < LENGTH:
        pytest.skip("packed sequences come without a cache")
    options = {"window": {"sliding_window": 11}, "packed": PACKED}.get(kind, {})
    heads, of_head = MIXED, OF_HEAD
    if kind == "sinks and softcap":
        options = {"softcap": 20.0, "s_aux": torch.linspace(-2, 2, NUM_HEADS)}
        heads, of_head = {**MIXED, 3: 0}, [0 if one == "sdpa" else one for one in OF_HEAD]
    query, key, value = inputs(1 if kind == "packed" else 2, rows)
    mask = mask_of(kind, rows)
    for forward in (hf.mala_attention_forward, hf.mala_reference_attention_forward):
        out = forward(Layer({"heads": heads}), query, key, value, mask, **options)[0]
        for kv_head, setting in itertools.product(range(NUM_KV_HEADS), {str(one): one for one in of_head}.values()):
            served = range(kv_head * NUM_HEADS // NUM_KV_HEADS, (kv_head + 1) * NUM_HEADS // NUM_KV_HEADS)
            some = [head for head in served if of_head[head] == setting]
            if some:
                own = {**options, **({"s_aux": options["s_aux"][some]} if "s_aux" in options else {})}
                tensors = query[:, some], key[:, [kv_head]], value[:, [kv_head]]
                own_mask = mask[:, some] if kind == "square by head" else mask
                assert_close(out[:, :, some], forward(Layer(setting), *tensors, own_mask, **own)[0])
        if rows == LENGTH:
            wholes = [forward(Layer(setting), query, key, value, mask, **options)[0] for setting in (None, 8.0, 0)]
            pairs = itertools.combinations(wholes, 2)
            assert all(not torch.allclose(one, other) for one, other in pairs), "settings make no difference here"


def test_gradients_are_those_of_the_heads_of_whole_layers():
    leaves = [x.requires_grad_() for x in inputs()]
    weight = torch.randn(2, LENGTH, NUM_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(3))
    out = hf.mala_attention_forward(Layer({"heads": MIXED}), *leaves, None)[0]
    found = torch.autograd.grad((out * weight).sum(), leaves)
    truth = [torch.zeros_like(x) for x in leaves]
    for setting in (None, 8.0, "sdpa", OF_HEAD[5], OF_HEAD[7]):
        own = torch.tensor([one == setting for one in OF_HEAD])[:, None]
        whole = hf.mala_attention_forward(Layer(setting), *leaves, None)[0]
        for total, part in zip(truth, torch.autograd.grad((whole * weight * own).sum(), leaves), strict=True):
            total += part
    for one, other in zip(found, truth, strict=True):
        assert_close(one, other, atol=5e-5, rtol=1e-5)  # gradients of about 10


def test_no_call_repeats_a_key_head():
    settings = LayerSettings(HeadSettings(1.0), tuple((head, HeadSettings(2.0)) for head in (0, 1, 2, 4)))
    groups = head_groups(settings, NUM_HEADS, NUM_KV_HEADS, 0, NUM_HEADS)
    assert [(group.heads, group.kv_heads, group.settings.tau) for group in groups] == [
        ((0, 1, 2), (0,), 2.0),
        ((3,), (0,), 1.0),
        ((4,), (1,), 2.0),
        ((5, 6, 7), (1,), 1.0),
    ]


def test_equal_settings_of_all_heads_are_one_call():
    settings = LayerSettings(HeadSettings(1.0), (("0-3", HeadSettings(1.0)), ("4-", HeadSettings(1.0))))
    assert [group.heads for group in head_groups(settings, NUM_HEADS, NUM_KV_HEADS, 0, NUM_HEADS)] == [None]


def test_a_window_narrows_and_never_widens():
    narrow, wide = ({"window": window} for window in (4, 1000))
    call = inputs()
    model_window = hf.mala_attention_forward(Layer(None), *call, None, sliding_window=9)[0]
    assert torch.equal(hf.mala_attention_forward(Layer(wide), *call, None, sliding_window=9)[0], model_window)
    as_the_models = hf.mala_attention_forward(Layer(None), *call, None, sliding_window=4)[0]
    assert torch.equal(hf.mala_attention_forward(Layer(narrow), *call, None, sliding_window=9)[0], as_the_models)


def test_a_window_of_heads_wins_over_the_layers():
    call = inputs()
    out = hf.mala_attention_forward(Layer({"window": 4, "heads": {0: {"window": 9}, 1: 0}}), *call, None)[0]
    for head, setting in enumerate([{"window": 9}, {"tau": 0, "window": 4}, *[{"window": 4}] * 6]):
        assert_close(out[:, :, head], hf.mala_attention_forward(Layer(setting), *call, None)[0][:, :, head])


def test_a_window_under_a_square_mask_counts_from_the_last_key_that_a_row_sees():
    """As in decoding with a static cache, which is longer than its content."""
    query, key, value = inputs(rows=1)
    mask = torch.zeros(2, 1, 1, LENGTH, dtype=torch.bool)
    mask[..., :20] = True
    out = hf.mala_attention_forward(Layer({"tau": 0, "window": 4}), query, key, value, mask)[0]
    short = hf.mala_attention_forward(Layer({"tau": 0}), query, key[:, :, 16:20], value[:, :, 16:20], None)[0]
    assert_close(out, short)


def test_a_window_of_a_layer_that_is_not_causal_is_refused():
    with pytest.raises(ValueError, match="not causal"):
        hf.mala_attention_forward(Layer({"window": 4}), *inputs(), None, is_causal=False)


def test_heads_shared_by_processes_that_nobody_knows_are_refused():
    query, key, value = inputs()
    with pytest.raises(ValueError, match="4 of the model's 8"):
        hf.mala_attention_forward(Layer({"heads": {0: 0.1}}), query[:, :4], key, value, None)


def test_ranges_and_indices_from_the_end_find_their_layers():
    for layers, dense in (({"0": "sdpa"}, [0]), ({-1: "sdpa"}, [1]), ({"*": "sdpa"}, [0, 1]), ({"-1-": "sdpa"}, [1]),
                          ({"0-1": "sdpa"}, [0, 1]), ({"-2--2": "sdpa"}, [0]), ({"1-": "sdpa"}, [1])):  # fmt: skip
        model = patch_model(tiny("llama"), MalaConfig(layers=layers))
        with mala_hf.record_work(model) as report:
            model(tokens(1, 9))
        assert [index for index, work in report.layers.items() if work.is_dense] == dense


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ({2: 1.0}, "has 2 layers, 0 to 1"), ({-3: 1.0}, "has 2 layers, 0 to 1"), ({"0-2": 1.0}, "has 2 layers"),
        ({"0-": 1.0, -1: 1.0}, "layer 1 is named twice"), ({"*": 1.0, 0: 1.0}, "layer 0 is named twice"),
        ({0: {"heads": {4: 1.0}}}, "has 4 heads, 0 to 3"), ({"*": {"heads": {"2-": 1.0, -1: 2.0}}}, "head 3 is named twice"),
    ],
    ids=str,
)  # fmt: skip
def test_layers_and_heads_that_the_model_lacks_are_refused_before_anything_changes(layers, said):
    model = tiny("llama")
    with pytest.raises(ValueError, match=said):
        patch_model(model, MalaConfig(layers=layers))
    assert not hasattr(model.config, "mala")


def test_the_report_says_what_each_head_did():
    layers = {"0": {"heads": {"0": "sdpa", "1": 0}}, "1": {"heads": {"*": 0.25}}}
    model, ids = tiny("llama", peaked=4), {"input_ids": tokens(1, 60)}
    report = work_of(model, ids, tile=SMALL_TILE, tau=4.0, layers=layers)
    whole = work_of(model, ids, tile=SMALL_TILE, tau=4.0, layers={"0": "sdpa"})
    first, second = report.layers.values()
    assert (first.tau, second.tau, first.forwards) == ([None, 0, 4.0, 4.0], 0.25, 1)
    assert first.work_fraction[:2].tolist() == [1, 1]
    assert first.work_fraction[2:].max() < 1
    assert first.impls == {"sdpa", "blockwise"}
    assert report.to_dict()["layers"][0]["tau"] == [None, 0, 4.0, 4.0]
    assert "sdpa 100 " in str(report)
    assert whole.layers[0].is_dense
    assert whole.layers[0].to_dict()["work_fraction"] == []


def test_the_numbers_of_a_head_do_not_depend_on_its_neighbours():
    model, ids = tiny("llama", peaked=4), {"input_ids": tokens(2, 60)}
    mixed = work_of(model, ids, tile=SMALL_TILE, layers={"0": {"heads": {"1": 4.0, "2": "sdpa"}}}).layers[0]
    for tau, heads in ((1.0, [0, 3]), (4.0, [1])):
        whole = work_of(model, ids, tile=SMALL_TILE, tau=tau).layers[0]
        for name in (
            "key_slots_per_query",
            "visible_slots_per_query",
            "omitted_mass_bound_mean",
            "omitted_mass_bound_p95",
        ):
            assert torch.equal(getattr(mixed, name)[heads], getattr(whole, name)[heads])


def test_a_compiled_model_runs_settings_by_head_without_graph_breaks():
    model = tiny("llama", peaked=4)
    layers = {"-1": {"heads": {"0-1": 0.5, "3": "sdpa"}, "window": 9}}
    with torch.no_grad(), attention(model, "mala", tile=SMALL_TILE, layers=layers):
        expected = model(tokens(1, 40), use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert_close(compiled(tokens(1, 40), use_cache=False).logits, expected)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("block", [(0, 20), (7, 20)], ids=["plain", "left"])
def test_a_model_given_a_window_generates_as_one_that_was_made_with_it(cache, block):
    ids, mask = tokens(2, 20), padding(20, (0, 20), block)
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "cache_implementation": cache}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    made_with_it = tiny("mistral")
    expected = made_with_it.generate(ids, **options)
    model = tiny("mistral")
    model.config.sliding_window = None
    full = model.generate(ids, **options)
    patch_model(model, MalaConfig(tau=0, layers={"*": {"window": made_with_it.config.sliding_window}}))
    found = model.generate(ids, **options)
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert_close(torch.stack(found.logits), torch.stack(expected.logits), **NOISE)
    assert not torch.allclose(torch.stack(full.logits), torch.stack(expected.logits), **NOISE)


@pytest.mark.parametrize(
    "kind",
    [{"use_reentrant": True}, {"use_reentrant": False}, {"use_reentrant": False, "context_fn": mala_hf.reuse_support}],
    ids=["reentrant", "non-reentrant", "reused support"],
)
def test_gradient_checkpointing_gives_the_same_bits(kind):
    ids, layers, gradients = tokens(2, 60), {"*": {"heads": {0: 4.0, 1: "sdpa", 2: {"window": 9}}}}, []
    for options in (None, kind):
        model = patch_model(tiny("llama", peaked=4), MalaConfig(tile=tuple(SMALL_TILE), layers=layers)).train()
        if options is not None:
            model.gradient_checkpointing_enable(options)
        model(ids, labels=ids).loss.backward()
        gradients.append([weight.grad for weight in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rows", [1, 1500])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_on_a_gpu_heads_do_what_a_whole_layer_does(head_dim, rows, monkeypatch):
    """Calls on some heads read strided views; the kernels give them the bits, forward and backward, that they give whole layers."""
    generator = torch.Generator("cuda").manual_seed(0)
    leaves = [
        (3 * torch.randn(2, heads, length, head_dim, device="cuda", dtype=torch.bfloat16, generator=generator)).requires_grad_()
        for heads, length in ((NUM_HEADS, rows), (NUM_KV_HEADS, 1500), (NUM_KV_HEADS, 1500))
    ]  # fmt: skip
    heads = {"0-1": 8.0, "5-6": {"tau": 0, "window": 500}, -1: {"window": 64}}
    layer = Layer({"heads": heads})
    del layer.config.mala["tile"]
    layer.config.mala["discovery"] = "fused"
    heard = []
    with monkeypatch.context() as patched:
        patched.setattr(hf, "recorders", [lambda module, calls: heard.extend(calls)])
        out = hf.mala_attention_forward(layer, *leaves, None)[0]
    assert sorted(head for call in heard for head in call.heads) == list(range(NUM_HEADS))
    assert {call.work.impl for call in heard} == {"triton"}
    weight = torch.randn(out.shape, device="cuda", generator=generator).bfloat16()
    gradient = torch.autograd.grad(out, leaves[0], weight)[0] if rows > 1 else None
    for setting, its in ((8.0, [0, 1]), (None, [2, 3, 4]), ({"tau": 0, "window": 500}, [5, 6]), ({"window": 64}, [7])):
        whole = Layer(setting)
        del whole.config.mala["tile"]
        expected = hf.mala_attention_forward(whole, *leaves, None)[0]
        assert_close(out[:, :, its], expected[:, :, its], atol=2e-2, rtol=2e-2)
        if gradient is not None:
            expected = torch.autograd.grad(expected, leaves[0], weight)[0]
            error = (gradient[:, its] - expected[:, its]).float().norm() / expected[:, its].float().norm()
            assert error < 2e-2
