"""Weight pushes into a real server (law 3): every tensor arrives, is used, and a wrong one is caught."""

import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from dapo_megatron.rollout.client import Generated, ServerClient
from dapo_megatron.rollout.requests import Sampling
from dapo_megatron.sync.group import TransferGroup
from dapo_megatron.sync.sender import PushReport, WeightSender
from dapo_megatron.sync.server_admin import ServerAdmin, ServerError
from tests.fleet.conftest import RunningServer
from tests.fleet.tiny import add_noise, load, log_probs, weights

PROBE = list(range(60, 150))  # longer than two blocks, so that the prefix cache can hit
BUCKET_BYTES = 1 << 16  # smaller than the embedding: it has a bucket of its own


def make_sender(running: RunningServer, timeout: float = 30) -> WeightSender:
    return WeightSender(
        [(running.url, running.token)],
        host="127.0.0.1",
        bucket_bytes=BUCKET_BYTES,
        dtype=torch.float32,
        timeout=timeout,
        backend="gloo",
    )


def push(sender: WeightSender, tensors: list[tuple[str, Tensor]], version: int) -> PushReport:
    return sender.push(iter(tensors), [(name, tuple(tensor.shape)) for name, tensor in tensors], version)


@pytest.fixture
def model(running: RunningServer) -> Qwen2ForCausalLM:
    return load(running.model)


@pytest.fixture
def sender(running: RunningServer) -> Iterator[WeightSender]:
    """A connected sender; afterwards the server has the weights of its folder again, as version 0."""
    sender = make_sender(running)
    try:
        sender.connect()
        yield sender
        sender.connect()
        push(sender, weights(load(running.model)), 0)
    finally:
        sender.close()


@pytest.fixture
def admin(running: RunningServer) -> Iterator[ServerAdmin]:
    admin = ServerAdmin(running.url, running.token, timeout=30)
    yield admin
    admin.close()


async def probe(running: RunningServer) -> Generated:
    async with ServerClient(running.url, running.token, timeout=60) as client:
        sampling = Sampling(max_tokens=16, temperature=0.0, ignore_eos=True)
        return await client.generate(PROBE, sampling, request_id=f"probe-{time.monotonic_ns()}")


def difference(model: Qwen2ForCausalLM, answer: Generated) -> float:
    expected = log_probs(model, PROBE, list(answer.token_ids))
    return float((expected - torch.tensor(answer.log_probs)).abs().max())


async def test_noisy_weights_pushed_twice_are_the_ones_sampled_with(
    running: RunningServer, sender: WeightSender, model: Qwen2ForCausalLM, admin: ServerAdmin
) -> None:
    assert difference(model, await probe(running)) < 1e-4
    for version in (1, 2):
        add_noise(model, 0.1, seed=version)
        # The probe's prompt is cached with the old weights' keys and values: it must not be used again.
        assert difference(model, await probe(running)) > 1e-2
        report = push(sender, weights(model), version)
        assert report.tensors == len(weights(model))
        assert report.bytes >= sum(tensor.nbytes for _, tensor in weights(model))
        answer = await probe(running)
        assert difference(model, answer) < 1e-4
        assert answer.versions == (version, version)
        assert admin.weight_version() == version


async def test_tied_output_matrix_follows_the_embedding(
    running: RunningServer, sender: WeightSender, model: Qwen2ForCausalLM
) -> None:
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1.3)
    push(sender, weights(model), 1)
    assert difference(model, await probe(running)) < 1e-4


def damage_first_bucket(group: TransferGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `group` flip one bit of the next bucket on its way."""
    send = group.start_broadcast

    def send_damaged(buffer: Tensor, timeout: float) -> None:
        damaged = buffer.clone()
        damaged[7] ^= 1
        monkeypatch.setattr(group, "start_broadcast", send)
        send(damaged, timeout)

    monkeypatch.setattr(group, "start_broadcast", send_damaged)


def test_flipped_bit_is_caught_and_the_version_stays(
    running: RunningServer,
    sender: WeightSender,
    model: Qwen2ForCausalLM,
    admin: ServerAdmin,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert sender._group is not None
    damage_first_bucket(sender._group, monkeypatch)
    first = weights(model)[0][0]
    with pytest.raises(ServerError, match=f"{running.url}, worker 0: tensor {first} arrived with hash"):
        push(sender, weights(model), 9)
    assert admin.weight_version() == 0


@pytest.mark.parametrize("missing", ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"])
def test_missing_tensor_is_named(sender: WeightSender, model: Qwen2ForCausalLM, missing: str) -> None:
    tensors = [(name, tensor) for name, tensor in weights(model) if name != missing]
    layer = missing.rpartition(".")[0].replace("k_proj", "qkv_proj")
    with pytest.raises(ServerError, match=f"left . parameters without weights, the first is {layer}"):
        push(sender, tensors, 9)


def test_missing_embedding_is_named(sender: WeightSender, model: Qwen2ForCausalLM) -> None:
    with pytest.raises(ServerError, match=r"the first is model\.embed_tokens\.weight"):
        push(sender, weights(model)[1:], 9)


def test_unknown_tensor_is_named(sender: WeightSender, model: Qwen2ForCausalLM) -> None:
    # First of all buckets, so that the server has to go on receiving after it has failed.
    tensors = [("model.layers.7.mlp.up_proj.weight", torch.zeros(96, 128)), *weights(model)]
    begun = time.monotonic()
    with pytest.raises(ServerError, match=r"layers\.7"):
        push(sender, tensors, 9)
    assert time.monotonic() - begun < 10


def test_tensors_must_follow_the_plan(sender: WeightSender, model: Qwen2ForCausalLM) -> None:
    tensors = weights(model)
    plan = [(name, tuple(tensor.shape)) for name, tensor in tensors]
    with pytest.raises(ValueError, match=r"the push plan expects model\.norm\.weight \(128,\), the weights yielded"):
        sender.push(iter(tensors[:-1]), plan, 9)


def test_server_that_refuses_does_not_hang_the_broadcast(
    sender: WeightSender, model: Qwen2ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Too large for the sockets' buffers: the broadcast cannot end without a receiver.
    tensors = [("model.embed_tokens.weight", torch.zeros(1 << 24)), *weights(model)[1:]]
    monkeypatch.setattr(sender, "_update_info", lambda plan: {"names": []})
    begun = time.monotonic()
    with pytest.raises(ServerError, match="update_weights failed"):
        push(sender, tensors, 9)
    assert time.monotonic() - begun < 10
