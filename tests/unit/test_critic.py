"""The critic on one rank: where its values come from, what it holds, learns and reports."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dapo_megatron.trainer  # noqa: F401  (adapts megatron-core before it is imported below)

# isort: split
from dapo_megatron.algorithm.value_loss import value_loss
from dapo_megatron.config.run import Config
from dapo_megatron.errors import UserError
from dapo_megatron.trainer.batching import Batch, MicroBatch
from dapo_megatron.trainer.critic import Critic
from dapo_megatron.trainer.parallel import Layout
from dapo_megatron.trainer.ranks import gather_by_response
from tests.batches import make_config, rows_of
from tests.critic import critic_batch, set_head, set_targets

Make = Callable[..., Config]


@pytest.fixture
def config(checkpoint: Callable[..., Path]) -> Make:
    """A config whose estimator is gae; arguments are sections."""

    def make(family: str = "qwen2", *, tied: bool = True, **sections: Any) -> Config:
        return make_config(checkpoint(family, tied=tied), algorithm={"advantage": {"estimator": "gae"}}, **sections)

    return make


def column(micro_batches: list[MicroBatch], name: str) -> Tensor:
    return torch.cat([getattr(micro, name) for micro in micro_batches])


def test_values_start_at_exactly_zero(config: Make, layout: Layout) -> None:
    critic = Critic(config(), layout)
    batch = critic_batch(critic)
    values = critic.values(batch)
    assert [len(v) for v in values] == [len(micro.responses) for micro in batch.micro_batches()]
    assert all(v.dtype == torch.float32 and not v.any() for v in values)


@pytest.mark.parametrize("tied", [True, False])
def test_values_are_of_the_state_in_which_a_token_is_chosen(config: Make, layout: Layout, tied: bool) -> None:
    """Against transformers: the last hidden state before the token, times the head."""
    import transformers

    settings = config(tied=tied)
    critic = Critic(settings, layout)
    set_head(critic)
    batch = critic_batch(critic)
    found = gather_by_response(batch.micro_batches(), critic.values(batch))
    model = transformers.AutoModel.from_pretrained(settings.model.path, dtype=torch.float32)
    head = critic.chunks[0].output_layer.weight[0]
    for response, (prompt, answer, _) in rows_of(batch.fetch(torch.empty(0).int().numpy())).items():
        if len(answer):
            ids = torch.tensor([[*prompt, *answer]])
            with torch.no_grad():
                hidden = model(ids).last_hidden_state[0]
                expected = hidden[len(prompt) - 1 : -1] @ head
            assert torch.allclose(found[response], expected, rtol=1e-4, atol=1e-5)
            assert float(expected.std(correction=0)) > 0.01 or len(answer) == 1
    assert len(found) == 15  # of 16, one of which is empty


@pytest.mark.parametrize("tied", [True, False])
def test_there_is_no_output_layer_for_the_vocabulary(config: Make, layout: Layout, tied: bool) -> None:
    critic = Critic(config(tied=tied), layout)
    (chunk,) = critic.chunks
    assert chunk.output_layer.weight.shape == (1, critic.arch.hidden_size)
    assert not chunk.share_embeddings_and_output_weights
    vocabulary = [n for n, p in chunk.named_parameters() if critic.arch.vocab_size in p.shape]
    assert vocabulary == ["embedding.word_embeddings.weight"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_values_of_a_model_in_16_bits(config: Make, layout: Layout, precision: str) -> None:
    """The head computes in fp32, and its master moves by less than 16 bits would see."""
    optimizer = {"lr": 1e-3, "weight_decay": 0.0}
    critic = Critic(config(training={"precision": precision}, critic={"optimizer": optimizer}), layout)
    set_head(critic)
    head = critic.chunks[0].output_layer.weight
    batch = critic_batch(critic)
    values = critic.values(batch)
    assert all(v.dtype == torch.float32 for v in values)
    assert not all(torch.equal(v, v.to(head.dtype)) for v in values)
    set_targets(batch, values)
    critic.start_step()
    before = head.main_param.clone()
    (mini_batch,) = batch.mini_batches()
    while critic.update(mini_batch)["critic/skipped_updates"]:  # fp16 looks for its loss scale
        assert precision == "fp16"
    moved = (head.main_param - before).abs()
    # Adam's first step is lr x sign(g).
    assert torch.allclose(moved, torch.full_like(moved, 1e-3 / 20), rtol=1e-3, atol=0)
    assert torch.equal(head.flatten(), head.main_param.to(head.dtype))


def test_loss_and_metrics_of_a_mini_batch(config: Make, layout: Layout) -> None:
    """Over all tokens at once, although they are in several micro-batches."""
    critic = Critic(config(), layout)
    set_head(critic)
    batch = critic_batch(critic)
    values = critic.values(batch)
    set_targets(batch, values)
    (mini_batch,) = batch.mini_batches()
    assert len(mini_batch.micro_batches) > 2
    metrics = critic.gradients(mini_batch)

    whole = torch.cat(values).double()
    old, returns = (column(mini_batch.micro_batches, name).double() for name in ("old_values", "returns"))
    losses, clipped = value_loss(whole, old, returns, torch.ones_like(whole, dtype=torch.bool), 0.2)
    explained = 1 - (returns - old).var(correction=0) / returns.var(correction=0)
    assert 0.1 < float(clipped.double().mean()) < 0.9
    assert metrics == pytest.approx(
        {
            "loss": float(losses.mean()),
            "value": float(whole.mean()),
            "clip": float(clipped.double().mean()),
            "explained_variance": float(explained),
        },
        rel=1e-5,
    )


def test_value_clip_can_be_off(config: Make, layout: Layout) -> None:
    critic = Critic(config(critic={"value_clip": None}), layout)
    set_head(critic)
    batch = critic_batch(critic)
    set_targets(batch, critic.values(batch))
    (mini_batch,) = batch.mini_batches()
    metrics = critic.gradients(mini_batch)
    values, returns = torch.cat(critic.values(batch)), column(mini_batch.micro_batches, "returns")
    assert metrics["clip"] == 0.0
    assert metrics["loss"] == pytest.approx(float((values - returns).square().mean() / 2), rel=1e-5)


@pytest.mark.parametrize(
    ("old", "returns", "expected"),
    [
        (0.1, 0.1, math.nan),  # 0.1 x n is no sum of equal numbers in fp64
        ("returns", None, 1.0),
        (0.0, None, 0.0),  # a constant explains nothing
        (0.7, None, 0.0),
    ],
)
def test_explained_variance(config: Make, layout: Layout, old: Any, returns: float | None, expected: float) -> None:
    critic = Critic(config(), layout)
    batch = critic_batch(critic)
    for micro in batch.micro_batches():
        n = len(micro.responses)
        micro.returns = micro.places.float() - 3 if returns is None else torch.full((n,), returns)
        micro.old_values = micro.returns if old == "returns" else torch.full((n,), old)
    (mini_batch,) = batch.mini_batches()
    assert critic.gradients(mini_batch)["explained_variance"] == pytest.approx(expected, abs=1e-9, nan_ok=True)


def fit(critic: Critic, batch: Batch, steps: int) -> list[dict[str, float]]:
    """Updates towards returns that depend on the token's place alone."""
    found = []
    for _ in range(steps):
        batch.set_old_values(critic.values(batch))
        for micro in batch.micro_batches():
            micro.returns = micro.places.float() / 6 - 1
        critic.start_step()
        found += [critic.update(mini_batch) for mini_batch in batch.mini_batches()]
    return found


def test_critic_learns(config: Make, layout: Layout) -> None:
    """With its own optimizer: the policy's learning rate would do nothing here."""
    optimizer = {"lr": 3e-3, "warmup_steps": 2, "weight_decay": 0.0}
    critic = Critic(config(critic={"optimizer": optimizer}, optimizer={"lr": 1e-12}), layout)
    updates = fit(critic, critic_batch(critic), 30)
    assert [u["critic/lr"] for u in updates[:3]] == pytest.approx([1.5e-3, 3e-3, 3e-3])
    assert updates[0]["critic/explained_variance"] == pytest.approx(0, abs=1e-9)
    assert updates[0]["critic/value"] == 0.0
    assert updates[0]["critic/grad_norm"] > 0
    assert updates[-1]["critic/loss"] < 0.1 * updates[0]["critic/loss"]
    assert updates[-1]["critic/explained_variance"] > 0.8
    assert set(updates[0]) == {
        "critic/" + name
        for name in ("loss", "value", "clip", "explained_variance", "grad_norm", "lr", "skipped_updates")
    }


def test_mini_batch_without_tokens_changes_nothing(config: Make, layout: Layout) -> None:
    settings = config()
    settings.algorithm.overlong.filter = True
    critic = Critic(settings, layout)
    batch = critic_batch(critic, truncated=True)
    before = [p.clone() for p in critic.chunks[0].parameters()]
    (metrics,) = fit(critic, batch, 1)
    assert metrics["critic/skipped_updates"] == 1.0
    assert metrics["critic/loss"] == metrics["critic/value"] == 0.0
    assert math.isnan(metrics["critic/explained_variance"])
    assert all(torch.equal(p, b) for p, b in zip(critic.chunks[0].parameters(), before, strict=True))


def test_critic_starts_from_its_own_checkpoint(config: Make, layout: Layout, checkpoint: Callable[..., Path]) -> None:
    """Of another family and size of layers, with the same vocabulary."""
    folder = checkpoint("qwen3")
    critic = Critic(config("qwen2", critic={"path": str(folder)}), layout)
    assert critic.arch.hf_class == "Qwen3ForCausalLM"
    assert not torch.cat(critic.values(critic_batch(critic))).any()


def test_checkpoint_of_other_shapes_is_refused(
    config: Make, layout: Layout, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint(), tmp_path / "critic")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"intermediate_size": 96', '"intermediate_size": 100'))
    with pytest.raises(UserError, match=r"critic.path: \S+ has the shape \(96, 64\), but config.json asks for"):
        Critic(config(critic={"path": str(folder)}), layout)


def test_keys_of_the_critics_optimizer_are_named(config: Make, layout: Layout) -> None:
    settings = config(critic={"optimizer": {"cpu_offload": 0.5}})
    with pytest.raises(UserError, match=r"^critic.optimizer.cpu_offload=0.5 needs a GPU"):
        Critic(settings, layout)
