# SPDX-License-Identifier: Apache-2.0
"""Trainer with gradient checkpointing takes the same steps as without, each kind in the way that docs/training.md shows."""

import pytest
from tiny_model import runs_of_tokens, tiny_llama
from transformers import Trainer, TrainingArguments

import mala_hf

pytestmark = pytest.mark.transformers

LENGTH, STEPS = 256, 3
KINDS = {
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
    "reused support": {"use_reentrant": False, "context_fn": mala_hf.reuse_support},
}


def losses(folder, kind=None, through_arguments=False):
    """Loss of each step, and how many forwards a layer ran."""
    model = mala_hf.patch_model(tiny_llama(positions=LENGTH), mala_hf.MalaConfig(tile=(16, 16)))
    options = {}
    if through_arguments:
        options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": KINDS[kind]}
    elif kind is not None:
        model.gradient_checkpointing_enable(KINDS[kind])
        model.enable_input_require_grads()
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        use_cpu=True,
        dataloader_pin_memory=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        **options,
    )
    windows = runs_of_tokens(8 * LENGTH, run=12).view(8, LENGTH)
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": x, "labels": x} for x in windows])
    with mala_hf.record_work(model) as work:
        trainer.train()
    assert work.work_fraction < 0.5
    return [logs["loss"] for logs in trainer.state.log_history if "loss" in logs], work.layers[0].forwards


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    found, forwards = losses(tmp_path_factory.mktemp("plain"))
    assert len(found) == STEPS
    assert forwards == STEPS
    return found


@pytest.mark.parametrize("through_arguments", [False, True], ids=["model", "arguments"])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_takes_the_same_steps(plain, kind, through_arguments, tmp_path):
    found, forwards = losses(tmp_path, kind, through_arguments)
    assert found == pytest.approx(plain, rel=1e-6)
    assert forwards == 2 * STEPS  # the second is the recomputation
