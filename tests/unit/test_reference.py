"""The frozen reference policy on one rank: its log-probs, that it stays as it is, and the KL term of the loss."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo_megatron.algorithm.aggregation import Aggregation, aggregate
from dapo_megatron.algorithm.kl import KLEstimator
from dapo_megatron.config.algorithm import AlgorithmConfig
from dapo_megatron.config.reference_view import reference_config
from dapo_megatron.config.run import Config
from dapo_megatron.config.training import ParallelConfig
from dapo_megatron.errors import UserError, renamed_keys
from dapo_megatron.trainer import reference as reference_module
from dapo_megatron.trainer.batching import Batch
from dapo_megatron.trainer.parallel import Layout, OtherLayout
from dapo_megatron.trainer.policy import Policy
from dapo_megatron.trainer.reference import HostWeights, Reference
from dapo_megatron.trainer.trained import outputs_of
from tests.batches import RESPONSE_TOKENS, load_batch, make_config
from tests.models import tiny_model

KL = {"kl": {"coefficient": 0.5}}
OTHER_LAYOUT = {"parallel": {"context_comm": "all_gather"}}  # of one rank too, but with groups of its own


def configure(model: Path, reference: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    return make_config(model, **({"algorithm": KL, "reference": reference or {}} | sections))


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("reference", [{}, OTHER_LAYOUT], ids=["policy's layout", "own layout"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_it_is_the_policy_at_the_start_and_stays_that(
    checkpoint: Callable[..., Path], layout: Layout, family: str, reference: dict[str, Any]
) -> None:
    config = configure(checkpoint(family), reference, rollout={"temperature": 0.7, "max_tokens": RESPONSE_TOKENS})
    policy, frozen = Policy(config, layout), Reference(config, layout)
    batch = load_batch(policy)
    start = policy.log_probs(batch)
    assert equal(frozen.log_probs(batch), start)

    batch.set_old_log_probs(start)
    batch.set_reference_log_probs(frozen.log_probs(batch))
    policy.start_step()
    for mini_batch in batch.mini_batches():
        policy.update(mini_batch)
    assert not equal(policy.log_probs(batch), start)
    assert equal(frozen.log_probs(batch), start)
    assert all(parameter.grad is None for chunk in frozen._chunks for parameter in chunk.parameters())


def test_another_model(tmp_path: Path, checkpoint: Callable[..., Path], layout: Layout) -> None:
    other = tiny_model(tmp_path / "other", "llama", tied=False, vocab=151, seed=1)
    config = configure(checkpoint(), {"path": str(other)})
    batch = load_batch(Policy(config, layout))
    expected = Policy(configure(other), layout).log_probs(batch)
    assert equal(Reference(config, layout).log_probs(batch), expected)


def test_precision(checkpoint: Callable[..., Path], layout: Layout) -> None:
    """bf16 for an fp32 policy: the log-probs of a bf16 policy, near those of the fp32 one but not equal to them."""
    config = configure(checkpoint(), {"precision": "bf16"})
    policy = Policy(config, layout)
    batch = load_batch(policy)
    found = Reference(config, layout).log_probs(batch)
    half = Policy(configure(checkpoint(), training=config.training.model_dump() | {"precision": "bf16"}), layout)
    assert equal(found, half.log_probs(batch))
    assert all(values.dtype == torch.float32 for values in found)
    difference = (torch.cat(found) - torch.cat(policy.log_probs(batch))).abs()
    assert 0 < difference.max() < 0.1


def test_a_batch_is_packed_again_where_the_layers_differ(
    checkpoint: Callable[..., Path], layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their attention reads sequences as its own backend packs them, also in one layout."""
    config = configure(checkpoint(), {"precision": "bf16"})
    names = {"fp32": "te", "bf16": "local"}
    monkeypatch.setattr(reference_module, "resolve_backend", lambda training: names[training.precision])
    frozen = Reference(config, layout)
    packed: list[Batch] = []

    def pack(*arguments: Any) -> Batch:
        packed.append(reference_loader(*arguments))
        return packed[-1]

    reference_loader = reference_module.load_batch
    monkeypatch.setattr(reference_module, "load_batch", pack)
    batch = load_batch(Policy(config, layout))
    found = frozen.log_probs(batch)
    assert len(packed) == 1
    assert equal(found, outputs_of(frozen._chunks, batch.micro_batches(), lambda outputs: outputs[0]))


def test_a_truncated_response_that_is_filtered_is_in_no_pass(checkpoint: Callable[..., Path], layout: Layout) -> None:
    algorithm = KL | {"overlong": {"filter": True}}
    config = configure(checkpoint(), OTHER_LAYOUT, algorithm=algorithm)
    policy = Policy(config, layout)
    whole = load_batch(policy)
    whole.header.truncated[[1, 5]] = True
    batch = reference_module.load_batch(whole.header, policy.packing, layout, whole.fetch)
    tokens = sum(len(micro.responses) for micro in batch.micro_batches())
    assert tokens == whole.header.response_lengths.sum() - whole.header.response_lengths[[1, 5]].sum()
    assert equal(Reference(config, layout).log_probs(batch), policy.log_probs(batch))


def main_gradient(policy: Policy) -> Tensor:
    """All of it as one vector, fp64."""
    return torch.cat([p.main_grad.flatten().double() for p in policy.chunks[0].parameters()])


def divergence(d: Tensor, estimator: KLEstimator) -> Tensor:
    """k2 and k3 of d = log pi - log ref, written out (Schulman, "Approximating KL divergence", 2020)."""
    return d.square() / 2 if estimator == "k2" else torch.exp(-d) - 1 + d


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_kl_in_the_loss(
    tmp_path: Path,
    checkpoint: Callable[..., Path],
    layout: Layout,
    estimator: KLEstimator,
    aggregation: Aggregation,
) -> None:
    """The gradient that the term adds is autograd's of a plain computation over the whole batch at once."""
    coefficient = 0.5
    other = tiny_model(tmp_path / "other", "qwen2", vocab=151, seed=1)
    config = configure(checkpoint(), {"path": str(other)})
    policy = Policy(config, layout)
    batch = load_batch(policy)
    batch.set_old_log_probs(policy.log_probs(batch))
    batch.set_reference_log_probs(Reference(config, layout).log_probs(batch))
    (mini_batch,) = batch.mini_batches()

    gradients, metrics = [], []
    for weight in (0.0, coefficient):
        kl = {"coefficient": weight, "estimator": estimator}
        policy.config.algorithm = AlgorithmConfig.model_validate({"aggregation": aggregation, "kl": kl})
        metrics.append(policy.gradients(mini_batch))
        gradients.append(main_gradient(policy))
    added = gradients[1] - gradients[0]

    (chunk,) = policy.chunks
    log_probs = torch.cat(
        [
            chunk(micro.input_ids, None, None, labels=micro.targets, packed_seq_params=micro.packed)[0]
            for micro in batch.micro_batches()
        ]
    )
    reference = torch.cat([micro.reference_log_probs for micro in batch.micro_batches()])
    responses = torch.cat([micro.responses for micro in batch.micro_batches()])
    penalty = divergence(log_probs - reference, estimator)
    assert penalty.max() < 10  # where k3 is capped
    mask = torch.ones_like(responses, dtype=torch.bool)
    loss = aggregate(penalty, mask, responses, aggregation, max_tokens=RESPONSE_TOKENS)
    parts = torch.autograd.grad(coefficient * loss, list(chunk.parameters()))
    expected = torch.cat([part.flatten().double() for part in parts])
    assert float((added - expected).norm() / expected.norm()) < 2e-6
    assert metrics[1]["kl"] == pytest.approx(float(penalty.detach().mean()), rel=1e-5)
    assert metrics[1]["kl"] > 0.01
    assert metrics[1]["loss"] - metrics[0]["loss"] == pytest.approx(coefficient * float(loss.detach()), rel=1e-5)


def test_weights_wait_in_host_memory() -> None:
    """A pass gets copies, which are dropped afterwards, also when it fails. The CPU stands for the GPU."""
    parameters = [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(5))]
    expected = [parameter.detach().clone() for parameter in parameters]
    weights = HostWeights(parameters, pinned=False)
    places = [parameter.data_ptr() for parameter in parameters]
    for fails in (False, True):
        with contextlib.suppress(ZeroDivisionError), weights.on(torch.device("cpu")):
            assert all(map(torch.equal, parameters, expected))
            assert not set(places) & {parameter.data_ptr() for parameter in parameters}
            assert 1 // (1 - fails)
        assert places == [parameter.data_ptr() for parameter in parameters]
        assert all(map(torch.equal, parameters, expected))


def test_a_pass_with_weights_from_host_memory(checkpoint: Callable[..., Path], layout: Layout) -> None:
    """As on a GPU, for which the CPU stands: there offload is without effect."""
    config = configure(checkpoint())
    batch, frozen = load_batch(Policy(config, layout)), Reference(config, layout)
    assert config.reference.offload
    assert frozen._host is None
    expected = frozen.log_probs(batch)
    places: list[int] = []

    class Host(HostWeights):
        def on(self, place: torch.device) -> contextlib.AbstractContextManager[None]:
            places.append(next(frozen._chunks[0].parameters()).data_ptr())
            return super().on(place)

    frozen._host = Host(frozen._chunks[0].parameters(), pinned=False)
    assert equal(frozen.log_probs(batch), expected)
    assert places == [next(frozen._chunks[0].parameters()).data_ptr()]


def test_other_layout_leaves_no_trace(layout: Layout) -> None:
    from megatron.core import parallel_state

    before = dict(vars(parallel_state))
    other = OtherLayout(ParallelConfig.model_validate({}))
    assert vars(parallel_state) == before
    group = parallel_state.get_tensor_model_parallel_group()
    with contextlib.suppress(ZeroDivisionError), other.active():
        assert parallel_state.get_tensor_model_parallel_group() is not group
        assert 1 // 0
    assert vars(parallel_state) == before
    assert other.layout == layout


def test_layout_that_the_ranks_do_not_fit(checkpoint: Callable[..., Path], layout: Layout) -> None:
    with pytest.raises(UserError) as caught:
        Reference(configure(checkpoint(), {"parallel": {"tensor": 2}}), layout)
    assert str(caught.value).startswith("torchrun 1 is not a multiple of reference.parallel.tensor x")


def test_model_that_the_layout_does_not_fit(checkpoint: Callable[..., Path], layout: Layout) -> None:
    with pytest.raises(UserError, match=r"^reference\.path: /nowhere/config.json does not exist"):
        Reference(configure(checkpoint(), {"path": "/nowhere"}), layout)


def test_its_configuration() -> None:
    """Forward passes alone, bf16 for FP8, and micro-batches that its layout can cut."""
    training = {"precision": "fp8", "fp8": {"recipe": "tensorwise"}, "recompute": "selective", "moe_aux_loss": 0.1}
    sizes = {"micro_batch_tokens": 96, "mini_batch": 16, "recompute_modules": ["moe"]}
    config = configure(Path("policy"), {"parallel": {"context": 5}}, training=training | sizes)
    own = reference_config(config)
    assert (own.model.path, own.parallel.context) == ("policy", 5)
    assert own.training.precision == "bf16"
    assert own.training.micro_batch_tokens == 100  # a multiple of 2 x 5
    defaults = type(own.training).model_validate({})
    for key in ("fp8", "recompute", "recompute_modules", "moe_aux_loss"):
        assert getattr(own.training, key) == getattr(defaults, key)
    assert config.training.precision == "fp8"  # the policy's own section is as it was


def test_longest_sequence_fits_the_padding_of_its_layout() -> None:
    config = configure(Path("policy"), {"parallel": {"context": 16}}, training={"micro_batch_tokens": 36})
    assert reference_config(config).training.micro_batch_tokens == 64  # 24 + 12 tokens, padded to a multiple of 32


def test_keys_in_messages() -> None:
    text = "parallel.tensor=2 of model.parallel.x at /a/parallel.b; use parallel.tensor=1 or training.precision=bf16"
    with pytest.raises(UserError) as caught, renamed_keys({"parallel.": "reference.parallel."}):
        raise UserError(text)
    assert str(caught.value) == text.replace("parallel.tensor", "reference.parallel.tensor")
