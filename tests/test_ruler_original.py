# SPDX-License-Identifier: Apache-2.0
"""Samples and metrics are those of RULER's own programs, byte for byte: against reference files kept beside the checkout.

Reference: NVIDIA/RULER c3f5e3b, seed 42, three samples a task, SmolLM2-135M-Instruct's tokenizer, wonderwords 3.0.1. Their hashes are
here; what goes in (tokenizer, essay, SQuAD and HotpotQA excerpts, where nltk splits sentences) is read from the reference files.
"""

from __future__ import annotations

import functools
import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest
from project import ROOT
from ruler_inputs import digest

from mala_hf.ruler import TASKS, Corpora, clean_prediction, generate, punkt_sentences
from mala_hf.ruler.metrics import mean_percent, string_match_all, string_match_part

REFERENCE = ROOT.parent / "shared" / "data" / "ruler_expected"
pytestmark = pytest.mark.skipif(
    not REFERENCE.is_dir(), reason="the reference samples of RULER are not beside this checkout"
)

SAMPLES = {
    ("niah_single_1", 1024): "8f0cf26fc9f34bdbf622bbfaa1eb96251ec21abd9f96ecd8d36fcfe2a1e08d83",
    ("niah_single_1", 4096): "431209f28e6efc9d74dd805dc5f9289f4a7cb4963b0de5e5fd50c13b560c4c89",
    ("niah_single_2", 1024): "81a2040224ecb47182b9c318e383756047f4335e00f6c03ba6b3d5721f1faebc",
    ("niah_single_2", 4096): "edcd4d78490b73dade5261767d6073b2bd8fd26957bc5f6599727226662c6b18",
    ("niah_single_3", 1024): "c37bf775a4d8c3875e7d4d3fe7309bf8911348e36ae4faa61db7b2ad98f54412",
    ("niah_single_3", 4096): "dff1ed8547c6fb3e2078549917170eea8fcdd30b6cadcf6a075c3351a9090d0e",
    ("niah_multikey_1", 1024): "1868ebaa3082b67989b24e8617b08ea7832d35481a42bdbad379ca6ce5c428c7",
    ("niah_multikey_1", 4096): "fe7944fc72e03f37733add0f8d0863c20bad717587bd520a1dfbc4ac6b4cf1b7",
    ("niah_multikey_2", 1024): "e88acfdbe446c9cc735e4c18d097617577ad0cf919376e3538a1c37c9b414608",
    ("niah_multikey_2", 4096): "ebc9b58e00c3e07d99abcdd857bc145a73594dcbf1bdef061b4359981da5c7a6",
    ("niah_multikey_3", 1024): "ef21175c32e70f465bc2388c858094ead9dc935c2e53743fc50ae9616c3763af",
    ("niah_multikey_3", 4096): "b389649434f315d5d268f52fc3f911a600a816bbd2352a398fc1565fa6110204",
    ("niah_multivalue", 1024): "5b4eb7bfc97dc6bbfa1e52a7459b3445a44bc71508146b14669e83ec7c3cba98",
    ("niah_multivalue", 4096): "c39970e3af0a1b497babac2415d0d85ad086805cdf8f6033c5bd98643eafacb6",
    ("niah_multiquery", 1024): "d33396a536d16359aef9148a2a1e9f9389bd28a81da452e4a0c48e7fe9c61937",
    ("niah_multiquery", 4096): "5486b99912831b669eb5ef4295955d8dad5b5f3dc54d6dfb7b59b43535704c06",
    ("vt", 1024): "7641b41eb7ecdc3ae1ac2e06d3f3c9bbdbf711faf97965c037a233e21a1e9895",
    ("vt", 4096): "0f7ecede4430c9f8f44e851a54ed57181717e9191e8f3c4aaa4d82e6c5525c37",
    ("cwe", 1024): "2da05a12fbd7f960e132a57215944db743c4b47ca7bde6bcf372965fea48af86",
    ("cwe", 4096): "c7055b34c8e59705436f9ae3141e6be86aae78488338b5efe534e8ef3dda89b0",
    ("fwe", 1024): "88e3bb2d03ee5fc9b020b0581a0c326768ccc26b8b0da9ceb21f0554580c0497",
    ("fwe", 4096): "8b0043f70bf68c238e9c2ae9c7c3aa93c165f78dbb4af08e3cfb9db4b4052bfe",
    ("qa_1", 1024): "01a4cc034ee340a5f9c554f486e8babd5869b5dd8bffeab07af87406d84fffb6",
    ("qa_1", 4096): "abd76c4e584c5aa9179269ed0bfd6095e59dbac6f184612973d7d4175ddf62dc",
    ("qa_2", 1024): "eb462722b4e276c072d48e3b45a065c27fa91ae5199f020a13a9cbb25a0246fc",
    ("qa_2", 4096): "501fc03c9bfff87a4d1ca524ecf69d971ef2c90e913039988d7fd6951743a366",
}

# seed 7, of a second implementation that follows the original's steps one by one and gives the stored samples, too
OTHERS = {
    ("niah_single_1", 2048): "c538d2bc1566fc58e60ab7846305acea9da17839422f106286750839ba5b2d68",
    ("niah_single_2", 2048): "668c8ddfdd1acd7a33597c68a7aee3bfd92d7f12749ad9024788b893d546d5c2",
    ("niah_single_3", 2048): "58bfb6b889d1b5db0dbd47b848f341108c761d21a3f27faec27557c0acd9d939",
    ("niah_multikey_1", 2048): "bba1dc65a1a75c4bb6bf90be36f7ce10ace157c339cd17ca73e12e050ce479c4",
    ("niah_multikey_2", 2048): "cfa7e300999a139b9562404e77bb2a42f4ee4c14b81d30ed19c89c7500069654",
    ("niah_multikey_3", 2048): "95d8ec55ea809fdb3067d4c024ea50b6ecf3d1f2e72e76fa33b77ce0dcaa03cf",
    ("niah_multivalue", 2048): "cf23e520a12ca31b14098f2e4b6b14bbee39b3f47e97fa731a4b5c07e6c6406c",
    ("niah_multiquery", 2048): "3b2f17471f04f55ea9cff36fee72fad75eb8ab4953e536a905d74fc9792ed971",
    ("vt", 2048): "ee1b70539db4ad0db02766641613f640ef2bf6c5f22856c9bab74bb5c1db82c6",
    ("cwe", 2048): "d2c29b6dad7f38a6cf525f870d3566b00245b4a19c767df55dbe1dc45f512ea7",
    ("fwe", 2048): "c49071d71391c5f83c160592d0584c169e8f619f07715f6bfb050de7113fc0be",
    ("qa_1", 2048): "1dcd6430e25f2f93618a4bd14d0b4b1d64b28910d0dca5d96160d267d4a652d6",
    ("qa_2", 2048): "47f919196db1284842072920c7725087ec595ad390699d3e3e698c3bbcb33e34",
    ("vt", 8192): "d266ce169dcd3e2852f1eee6a69979e0f1fa21161c87e2c5c8be37c5774677ec",
    ("cwe", 8192): "e48c3bca74076bab0d289886e744ee0003ee3d0ae01d03bb7e066add72f2c15c",
    ("fwe", 8192): "eb635197686409c1e747f6ed07158a0476808b76ce8f8f7fc6a7cffeea693b15",
    ("qa_1", 8192): "3b59716061546e44605542d04d2861482e2af38ccf11ea4ccf8c1f5e8d1366ff",
    ("qa_2", 8192): "094da009815ff9da4d23d6a84cb9a164213bdb7eeac7ab778c51c6d9476dc82b",
}


@functools.cache
def sentence_starts() -> tuple[list[int], str]:
    """Where nltk's English Punkt model starts sentences in the first 6000 words of the essay, and these words."""
    starts = json.loads((REFERENCE / "inputs" / "essay_sentence_starts.json").read_text("utf-8"))["starts"]
    words = Corpora(essays=REFERENCE / "inputs" / "PaulGrahamEssays.json.gz").essay_words()
    return starts, " ".join(words[:6000])


def split_as_punkt_does(text: str) -> list[str]:
    starts, whole = sentence_starts()
    assert whole.startswith(text)
    cuts = [*(start for start in starts if start < len(text)), len(text)]
    return [text[start:end].strip() for start, end in pairwise(cuts)]


@pytest.fixture(scope="module")
def corpora() -> Corpora:
    inputs = REFERENCE / "inputs"
    return Corpora(
        essays=inputs / "PaulGrahamEssays.json.gz",
        squad=inputs / "squad.json",
        hotpotqa=inputs / "hotpotqa.json",
        split_sentences=split_as_punkt_does,
    )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    from transformers import AutoTokenizer

    folder: Path = tmp_path_factory.mktemp("tokenizer")
    source = REFERENCE / "tokenizer"
    (folder / "tokenizer.json").write_bytes(gzip.decompress((source / "tokenizer.json.gz").read_bytes()))
    (folder / "tokenizer_config.json").write_bytes((source / "tokenizer_config.json").read_bytes())
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("length", [1024, 4096])
@pytest.mark.parametrize("task", TASKS)
def test_samples_are_those_of_the_original_generators(task, length, tokenizer, corpora):
    samples = generate(task, tokenizer=tokenizer, length=length, num_samples=3, seed=42, corpora=corpora)
    assert digest(samples) == SAMPLES[task, length]


@pytest.mark.parametrize(("task", "length"), OTHERS)
def test_samples_of_another_seed_and_length_are_too(task, length, tokenizer, corpora):
    samples = generate(task, tokenizer=tokenizer, length=length, num_samples=3, seed=7, corpora=corpora)
    assert digest(samples) == OTHERS[task, length]


def test_nltk_splits_where_the_reference_says():
    pytest.importorskip("nltk", reason="nltk is not installed")
    text = sentence_starts()[1]
    try:
        sentences = punkt_sentences(text)
    except LookupError:
        pytest.skip("nltk has no punkt_tab data here")
    assert sentences == split_as_punkt_does(text)


def test_metrics_are_the_original_ones():
    metrics = json.loads((REFERENCE / "metrics.json").read_text("utf-8"))
    pairs = metrics["pairs"]
    assert len(pairs) == 20
    for pair in pairs:
        raw, references = pair["prediction"], pair["references"]
        cleaned = clean_prediction(pair["prediction"])
        assert cleaned == pair["postprocessed"], pair["name"]
        for metric in (string_match_all, string_match_part):
            assert mean_percent([metric(cleaned, references)]) == pair[metric.__name__], pair["name"]
            assert mean_percent([metric(raw, references)]) == pair[f"raw_{metric.__name__}"], pair["name"]

    for group, (first, last) in {"all_20": (1, 20), "first_7": (1, 7), "7_to_9": (7, 9)}.items():
        some = pairs[first - 1 : last]
        for metric in (string_match_all, string_match_part):
            shares = [metric(pair["postprocessed"], pair["references"]) for pair in some]
            assert mean_percent(shares) == metrics["corpus"][group][metric.__name__], group
