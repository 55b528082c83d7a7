"""Megatron's log-probs beside those of transformers."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tests.batches import load_batch, make_batch, make_config, rows_of

if TYPE_CHECKING:
    from dapo_megatron.trainer.parallel import Layout


@torch.no_grad()
def expected_log_probs(model: torch.nn.Module, prompt: list[int], response: list[int], temperature: float) -> Tensor:
    """Log-probs of the response's tokens, fp32, computed by transformers."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1)[torch.arange(len(response)), response]


def check_log_probs(folder: Path, layout: "Layout") -> None:
    """The policy and transformers agree on every response token of a batch within 1e-4, at temperature 0.7."""
    from transformers import AutoModelForCausalLM

    from dapo_megatron.trainer.policy import Policy
    from dapo_megatron.trainer.ranks import gather_by_response

    policy = Policy(make_config(folder, rollout={"temperature": 0.7}), layout)
    batch = load_batch(policy)
    found = gather_by_response(batch.micro_batches(), policy.log_probs(batch))
    _, tokens = make_batch(policy.arch.vocab_size)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for response, (prompt, answer, _unused) in rows_of(tokens).items():
        if len(answer):
            expected = expected_log_probs(reference, prompt.tolist(), answer.tolist(), 0.7)
            torch.testing.assert_close(found.pop(response), expected, atol=1e-4, rtol=0)
    assert not found
