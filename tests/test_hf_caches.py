# SPDX-License-Identifier: Apache-2.0
"""Every cache of Transformers: its steps are decodes in two passes that read it where it lies, and a compiler sees them once."""

from __future__ import annotations

import importlib.util
import inspect

import pytest
import torch
import transformers as hf
from decode_calls import Calls, record_calls
from models import CACHE, DECODERS, NOISE, SMALL_TILE, attention, padding, tiny, tokens
from offloading import late
from torch._dynamo.utils import counters
from torch.testing import assert_close

pytestmark = pytest.mark.transformers

PROMPT, NEW = 20, 8
MASKS = {"plain": None, "left": padding(PROMPT, (0, PROMPT), (7, PROMPT))}
SETTINGS = {
    "tau": {"tau": 0.5},
    "heads": {"layers": {"0": {"heads": {"0-1": 0.2, "2-": {"window": 9}}}}},
    "every other head": {"layers": {"*": {"heads": {"0": 0.2, "2": 0.2}}}},
    "a dense layer": {"layers": {"0": "sdpa", "1": {"window": 9}}},
    "dense heads": {"layers": {"*": {"heads": {"0-1": "sdpa"}}}},
}


@pytest.fixture
def calls(monkeypatch) -> Calls:
    return record_calls(monkeypatch)


def generate(model, ids: torch.Tensor, name: str = "mala", mala: dict | None = None, **options):
    """New tokens (batch, NEW), scores (batch, NEW, vocabulary) of a greedy generation."""
    options = {"max_new_tokens": NEW, "do_sample": False} | options
    with attention(model, name, **(mala or {})):
        out = model.generate(ids, return_dict_in_generate=True, output_logits=True, **options)
    return out.sequences[:, ids.shape[1] :], torch.stack(out.logits, 1)


def assert_steps(calls: Calls, at_least: int) -> None:
    assert len(calls.steps) >= at_least
    assert {(call.form, call.is_masked, call.in_cache) for call in calls.steps} == {("two_pass", False, True)}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", MASKS)
@pytest.mark.parametrize("family", DECODERS)
def test_steps_are_decodes_without_mask_or_copy(family, padded, cache, calls):
    generate(tiny(family), tokens(2, PROMPT), attention_mask=MASKS[padded], cache_implementation=cache)
    assert_steps(calls, at_least=2 * (NEW - 1))


STRATEGIES = {
    "beam search": {"num_beams": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "chunked prefill": {"prefill_chunk_size": 6},
    "chunked prefill, static": {"prefill_chunk_size": 6, "cache_implementation": "static"},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_steps_of_every_strategy_are_decodes(family, strategy, calls):
    ids = tokens(1, PROMPT)
    ids[:, 10:] = ids[:, :10]  # something to look up
    generate(tiny(family), ids, **STRATEGIES[strategy])
    assert_steps(calls, at_least=2)
    most = max(call.seqlen_q for call in calls.steps)
    # the first call takes the prompt with what was looked up; sliding layers may have less to look at
    assert most > 1 if strategy != "beam search" else most == 1


def test_steps_of_assisted_generation_are_decodes(calls):
    model, assistant = tiny("llama"), tiny("llama")
    with attention(assistant, "mala"):
        generate(model, tokens(1, PROMPT), assistant_model=assistant)
    assert_steps(calls, at_least=4)
    assert max(call.seqlen_q for call in calls.steps) > 1


@pytest.mark.parametrize("padded", MASKS)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_settings_mean_the_same_on_every_cache(family, settings, padded, calls):
    model, ids, mala = tiny(family, peaked=4), tokens(2, PROMPT), {"tile": SMALL_TILE} | SETTINGS[settings]
    mask = MASKS[padded]
    dynamic = generate(model, ids, mala=mala, attention_mask=mask)
    static = generate(model, ids, mala=mala, attention_mask=mask, cache_implementation="static")
    assert static[0].tolist() == dynamic[0].tolist()
    assert_close(static[1], dynamic[1], **NOISE)
    assert_steps(calls, at_least=2 * (NEW - 1))
    assert (generate(model, ids, "eager", attention_mask=mask)[1] - static[1]).abs().max() > 1e-3


def test_a_dense_layer_copies_no_keys(monkeypatch):
    """Grouped heads under a mask share their keys as rows of one head."""
    from mala_hf.ops import hf_dense

    model, heads = tiny("llama"), set()
    real = hf_dense.scaled_dot_product_attention
    monkeypatch.setattr(
        hf_dense, "scaled_dot_product_attention", lambda q, k, v, **more: heads.add(k.shape[1]) or real(q, k, v, **more)
    )
    dense = generate(model, tokens(2, PROMPT), mala={"layers": {"*": "sdpa"}}, cache_implementation="static")
    assert heads == {model.config.num_key_value_heads}
    expected = generate(model, tokens(2, PROMPT), "eager")
    assert dense[0].tolist() == expected[0].tolist()
    assert_close(dense[1], expected[1], **NOISE)


@pytest.fixture
def nothing_compiled():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compilation(backend: str = "eager") -> hf.CompileConfig:
    config = hf.CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True  # else Transformers compiles on accelerators only
    return config


@pytest.mark.parametrize("padded", MASKS)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt_oss", "qwen2"])
def test_a_compiled_generation_compiles_nothing_after_its_first_steps(family, padded, nothing_compiled):
    """One graph; two where a window fills, as with SDPA. Then none, however long the context gets."""
    model, ids = tiny(family), tokens(2, PROMPT)
    options = {
        "attention_mask": MASKS[padded], "cache_implementation": "static", "compile_config": compilation(), "max_new_tokens": 80,
    }  # fmt: skip
    graphs = []
    for _ in range(2):
        got, scores = generate(model, ids, mala={"tau": 0}, **options)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1 if family == "llama" else 2] * 2
    assert not counters["graph_break"]
    expected, expected_scores = generate(model, ids, "eager", attention_mask=MASKS[padded], max_new_tokens=80)
    assert got.tolist() == expected.tolist()
    assert_close(scores, expected_scores, **NOISE)


def test_compiled_steps_are_decodes(nothing_compiled, monkeypatch):
    from mala_hf.ops import operators

    forms = []
    real = operators._decode
    monkeypatch.setattr(operators, "_decode", lambda *inputs: forms.append(inputs[7]) or real(*inputs))
    generate(tiny("llama"), tokens(2, PROMPT), cache_implementation="static", compile_config=compilation())
    assert forms == ["two_pass"] * 2 * (NEW - 1)


@pytest.mark.parametrize("new", [1, 3])
def test_a_loop_that_compiles_the_model_itself_compiles_once(new, nothing_compiled, monkeypatch):
    from mala_hf.ops import operators

    forms = []
    real = operators._decode
    monkeypatch.setattr(operators, "_decode", lambda *inputs: forms.append(inputs[7]) or real(*inputs))
    model, ids = tiny("llama"), tokens(2, PROMPT + 60)
    with torch.no_grad(), attention(model, "mala", tau=0):
        expected = model(ids, use_cache=False).logits[:, PROMPT:]
        cache = hf.StaticCache(config=model.config, max_cache_len=100)
        model(ids[:, :PROMPT], **{CACHE: cache})
        step = torch.compile(model, backend="eager", fullgraph=True)
        outs = []
        for start in range(PROMPT, PROMPT + 60, new):
            positions = torch.arange(start, start + new)[None]
            outs.append(step(ids[:, start : start + new], position_ids=positions, **{CACHE: cache}).logits)
    assert_close(torch.cat(outs, 1), expected, **NOISE)
    assert counters["stats"]["unique_graphs"] == 1
    assert forms == ["two_pass"] * 2 * (60 // new)


def quantized(backend: str) -> dict:
    if backend == "quanto":
        pytest.importorskip("optimum.quanto")
    elif "fp8" not in inspect.getsource(hf.cache_utils.QuantizedCache):
        pytest.skip("this Transformers has no fp8 cache")
    if backend == "quanto" and importlib.util.find_spec("ninja") is None:
        pytest.skip("quanto builds its operators with ninja")
    return {"cache_implementation": "quantized", "cache_config": {"backend": backend}}


@pytest.mark.parametrize("padded", MASKS)
@pytest.mark.parametrize("backend", ["fp8", "quanto"])
def test_a_quantized_cache_gives_what_it_gives_sdpa(backend, padded, calls):
    """Keys and values arrive dequantised, a copy that the cache makes."""
    model, ids, options = tiny("llama"), tokens(2, 40), quantized(backend)
    mask = None if MASKS[padded] is None else torch.cat([MASKS[padded], torch.ones(2, 20, dtype=torch.long)], 1)
    expected = generate(model, ids, "sdpa", attention_mask=mask, **options)
    exact = generate(model, ids, mala={"tau": 0}, attention_mask=mask, **options)
    assert_steps(calls, at_least=2 * (NEW - 1))
    assert exact[0].tolist() == expected[0].tolist()
    assert_close(exact[1], expected[1], **NOISE)
    # the cache is quantised, and MALA at its default close
    full = generate(model, ids, "sdpa", attention_mask=mask)
    assert (full[1] - expected[1]).abs().max() > 1e-3
    close = generate(model, ids, attention_mask=mask, **options)
    assert (close[1][:, 0] - expected[1][:, 0]).abs().max() < 0.2 * expected[1][:, 0].abs().max()


@pytest.fixture
def ordered_prefetches(monkeypatch):
    """A layer comes back after its copy to the CPU, and after all that reads the memory it takes.

    Transformers does so from 5.20 on. Before, the stream of the prefetches did not wait: with two layers each was read back from memory
    that its copy had not reached yet, whatever the attention.
    """
    prefetch = hf.Cache.prefetch

    def ordered(cache, *args, **kwargs):
        cache.prefetch_stream.wait_stream(torch.cuda.current_stream())
        return prefetch(cache, *args, **kwargs)

    monkeypatch.setattr(hf.Cache, "prefetch", ordered)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "cache"),
    [(family, "offloaded") for family in ("llama", "mistral", "gemma3")]
    # not Mistral: where all layers slide, this cache has none to offload, and Transformers fails
    + [(family, "offloaded_static") for family in ("llama", "gemma3")],
)
def test_an_offloaded_cache_generates_the_tokens_of_eager(family, cache, ordered_prefetches):
    model, ids = tiny(family).cuda(), tokens(2, PROMPT).cuda()
    expected, expected_scores = generate(model, ids, "eager", max_new_tokens=40)
    # Transformers 5.17 crashes while it compiles this
    options = {"cache_implementation": cache, "disable_compile": True, "max_new_tokens": 40}
    for name in ("eager", "mala"):  # if the first differs, it is not MALA
        with late(model):
            got, scores = generate(model, ids, name, mala={"tau": 0}, **options)
        assert got.tolist() == expected.tolist(), name
        assert_close(scores, expected_scores, atol=2e-3, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_cuda_graphs_of_a_compiled_generation_give_the_tokens_of_eager(family, nothing_compiled):
    """A thousand steps, no graph after the first few."""
    model, ids = tiny(family).cuda(), tokens(2, PROMPT).cuda()
    model.config.max_position_embeddings = 2048
    options = {"cache_implementation": "static", "max_new_tokens": 1000}
    config = hf.CompileConfig(fullgraph=True, mode="reduce-overhead")
    got, _ = generate(model, ids, mala={"tau": 0}, compile_config=config, **options)
    assert counters["stats"]["unique_graphs"] <= 2
    expected, expected_scores = generate(model, ids, "eager", max_new_tokens=1000)
    same = (got == expected).int().cumprod(1).sum(1)
    for sequence, length in enumerate(same.tolist()):
        if length < 1000:  # a tie
            best = expected_scores[sequence, length].topk(2).values
            assert best[0] - best[1] < 1e-3
