"""What the ranks of `verify layout` compute: the comparison, fp64, and the batch."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dapo_megatron.checkpoint.safetensors_file import Entry
from dapo_megatron.trainer import device, parallel
from dapo_megatron.trainer.policy import Policy
from dapo_megatron.trainer.verify_layout import (
    compare,
    compute_in_fp64,
    layout_results,
    nearby_log_probs,
    random_batch,
    random_rollouts,
)
from dapo_megatron.verify import Machine
from tests.batches import make_config
from tests.models import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen2")


def test_compare_gives_the_relative_norm_of_the_difference() -> None:
    reference = {"a": torch.tensor([3.0, 4.0]), "zero": torch.zeros(2), "wrong": torch.zeros(2), "nan": torch.ones(2)}
    found = {
        "a": torch.tensor([3.0, 4.5]),
        "zero": torch.zeros(2),
        "wrong": torch.tensor([0.0, 1e-9]),
        "nan": torch.tensor([1.0, math.nan]),
    }
    errors = compare(found.items(), reference.__getitem__)
    assert errors == {"a": pytest.approx(0.1), "wrong": math.inf, "nan": math.inf}


def test_compare_refuses_what_cannot_agree() -> None:
    with pytest.raises(RuntimeError, match=r"a has the shape \(2,\), the reference \(3,\)"):
        compare({"a": torch.ones(2)}.items(), {"a": torch.ones(3)}.__getitem__)
    with pytest.raises(RuntimeError, match="nothing to compare"):
        compare({"a": torch.zeros(2)}.items(), {"a": torch.zeros(2)}.__getitem__)


def test_fp64_results_are_those_of_fp32_to_its_rounding(model: Path) -> None:
    """And have gradients: megatron's hooks must survive the change of dtype."""
    config = make_config(model)
    (exact, tensors, entries), (rounded, rounded_tensors, _) = (
        layout_results(config, fp64=fp64) for fp64 in (True, False)
    )
    pairs = dict(tensors)
    assert entries == [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in pairs.items()]
    errors = compare(rounded_tensors, pairs.__getitem__)
    assert len([name for name in errors if name.startswith("grad/")]) == 50
    assert len([name for name in errors if name.startswith("log_probs/")]) == 15  # one response is empty
    assert 1e-9 < max(errors.values()) < 1e-4
    assert exact["loss"] == pytest.approx(rounded["loss"], rel=1e-5)
    assert exact["loss"] != rounded["loss"]


def test_a_wrong_gradient_is_found(model: Path) -> None:
    config = make_config(model)
    reference = dict(layout_results(config, fp64=True)[1])
    _, found, _ = layout_results(make_config(model, rollout={"temperature": 1.001}), fp64=True)
    errors = compare(found, reference.__getitem__)
    assert min(error for name, error in errors.items() if name.startswith("grad/")) > 1e-5


def test_a_few_tokens_are_clipped_and_most_are_not(model: Path) -> None:
    config = make_config(model)
    metrics, _, _ = layout_results(config, fp64=True)
    assert 0.02 < metrics["clip_high"] < 0.3
    assert 0.01 < metrics["clip_low"] < 0.3


def test_nearby_log_probs_belong_to_their_tokens(model: Path) -> None:
    """However the batch is cut, a token's old log-prob is off by the same amount."""
    added = []
    for tokens in (96, 4096):
        config = make_config(model, training={"micro_batch_tokens": tokens})
        policy = Policy(config, parallel.initialize(config.parallel, seed=1, threads=1))
        compute_in_fp64(policy)
        batch = random_batch(policy)
        own = policy.log_probs(batch)
        places = [zip(m.responses.tolist(), m.places.tolist(), strict=True) for m in batch.micro_batches()]
        noise = [(old - lp).tolist() for old, lp in zip(nearby_log_probs(batch, own), own, strict=True)]
        added.append(dict(pair for p, n in zip(places, noise, strict=True) for pair in zip(p, n, strict=True)))
    assert len(added[0]) > 50
    assert added[0] == pytest.approx(added[1], abs=1e-12)
    assert np.std(list(added[0].values())) == pytest.approx(0.25, rel=0.2)


def test_random_rollouts_are_a_whole_batch() -> None:
    header, tokens = random_rollouts(50, groups=3, samples=4, max_prompt_tokens=9, max_tokens=6, seed=1)
    assert header.groups.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert (header.response_lengths == 0).tolist() == [i == 3 for i in range(12)]
    assert header.response_lengths.max() <= 6
    assert header.prompt_lengths.min() >= 5
    assert header.prompt_lengths.max() <= 9
    assert len(tokens.response_tokens) == len(tokens.rollout_log_probs) == header.response_lengths.sum()
    assert len(tokens.prompt_tokens) == header.prompt_lengths[header.groups].sum()
    assert tokens.response_tokens.max() < 50
    first, second = np.split(tokens.prompt_tokens, np.cumsum(tokens.prompt_lengths)[:-1])[:2]
    assert (first == second).all()  # one prompt for the group


def test_the_smallest_gpu_limits_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_cuda", lambda: False)
    assert Machine.here().gpus == 0
    assert Machine.here().memory > 0
    sizes = [80 << 30, 40 << 30]
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(sizes))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=sizes[i]))
    assert Machine.here() == Machine(gpus=2, memory=40 << 30)
