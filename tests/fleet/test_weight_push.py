"""Weight pushes into a real server (law 3): every tensor arrives, is used, and a wrong one is caught."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from dapo_megatron.rollout.client import ServerClient
from dapo_megatron.rollout.requests import Generated, Sampling
from dapo_megatron.sync.channel import Way
from dapo_megatron.sync.delta import DeltaSender
from dapo_megatron.sync.group import TransferGroup
from dapo_megatron.sync.plan import TransferPlan
from dapo_megatron.sync.server_admin import ServerAdmin, ServerError
from tests.fleet.conftest import RunningServer
from tests.fleet.tiny import add_noise, load, log_probs, weights
from tests.pushing import Push, plan_of, renamed, without

PROBE = list(range(60, 150))  # longer than two blocks, so that the prefix cache can hit


@pytest.fixture
def model(running: RunningServer) -> Qwen2ForCausalLM:
    return load(running.model)


@pytest.fixture
def connect(running: RunningServer) -> Iterator[Callable[..., Push]]:
    """Connects pushes with a plan; afterwards the server has the weights of its folder again, as version 0."""
    opened: list[Push] = []

    def connected(plan: TransferPlan, way: Way = "broadcast") -> Push:
        opened.append(Push(plan, [(running.url, running.token)], way=way))
        opened[-1].connect()
        return opened[-1]

    yield connected
    restore = connected(plan_of(running.model))
    restore(weights(load(running.model)), 0)
    for push in opened:
        push.close()


@pytest.fixture
def push(running: RunningServer, connect: Callable[..., Push]) -> Push:
    return connect(plan_of(running.model))


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
    running: RunningServer, push: Push, model: Qwen2ForCausalLM, admin: ServerAdmin
) -> None:
    push(weights(model), 0)  # tests before this one may have left others in the shared server
    assert difference(model, await probe(running)) < 1e-4
    for version in (1, 2):
        add_noise(model, 0.1, seed=version)
        # The probe's prompt is cached with the old weights' keys and values: it must not be used again.
        assert difference(model, await probe(running)) > 1e-2
        report = push(weights(model), version)
        assert report.tensors == len(weights(model))
        assert report.bytes[0] >= sum(tensor.nbytes for _, tensor in weights(model))
        assert report.phases.keys() >= {"gather", "pack", "hash", "wait", "receive", "verify", "load"}
        answer = await probe(running)
        assert difference(model, answer) < 1e-4
        assert set(answer.versions.tolist()) == {version}
        assert admin.weight_version() == version


async def test_tied_output_matrix_follows_the_embedding(
    running: RunningServer, push: Push, model: Qwen2ForCausalLM
) -> None:
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1.3)
    push(weights(model), 1)
    assert difference(model, await probe(running)) < 1e-4


def damage_first_bucket(group: TransferGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `group` flip one bit of the next bucket on its way."""
    send = group.start_broadcast

    def send_damaged(buffer: Tensor, timeout: float) -> int:
        damaged = buffer.clone()
        damaged[7] ^= 1
        monkeypatch.setattr(group, "start_broadcast", send)
        return send(damaged, timeout)

    monkeypatch.setattr(group, "start_broadcast", send_damaged)


def test_flipped_bit_is_caught_and_the_version_stays(
    running: RunningServer,
    push: Push,
    model: Qwen2ForCausalLM,
    admin: ServerAdmin,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (group,) = push.pusher._groups.values()
    assert isinstance(group, TransferGroup)
    damage_first_bucket(group, monkeypatch)
    first = weights(model)[0][0]
    with pytest.raises(ServerError, match=f"{running.url}, worker 0: tensor {first} arrived with hash") as caught:
        push(weights(model), 9)
    assert caught.value.url == running.url
    assert admin.weight_version() == 0


@pytest.mark.parametrize("missing", ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"])
def test_missing_tensor_is_named(
    running: RunningServer, connect: Callable[..., Push], model: Qwen2ForCausalLM, missing: str
) -> None:
    layer = missing.rpartition(".")[0].replace("k_proj", "qkv_proj")
    push = connect(without(plan_of(running.model), missing))
    with pytest.raises(ServerError, match=f"left . parameters without weights, the first is {layer}"):
        push(weights(model), 9)


async def test_missing_embedding_is_named_and_the_next_push_succeeds(
    running: RunningServer, connect: Callable[..., Push], model: Qwen2ForCausalLM
) -> None:
    push = connect(without(plan_of(running.model), "model.embed_tokens.weight"))
    with pytest.raises(ServerError, match=r"the first is model\.embed_tokens\.weight"):
        push(weights(model), 9)
    add_noise(model, 0.1, seed=9)
    connect(plan_of(running.model))(weights(model), 9)
    assert difference(model, await probe(running)) < 1e-4


def test_unknown_tensor_is_named(running: RunningServer, connect: Callable[..., Push], model: Qwen2ForCausalLM) -> None:
    # In the first of all buckets, so that the server has to go on receiving after it has failed.
    known, unknown = "model.embed_tokens.weight", "model.layers.7.mlp.up_proj.weight"
    push = connect(renamed(plan_of(running.model), known, unknown))
    begun = time.monotonic()
    with pytest.raises(ServerError, match=r"layers\.7"):
        push([(unknown if name == known else name, tensor) for name, tensor in weights(model)], 9)
    assert time.monotonic() - begun < 10


def test_tensors_must_have_the_shapes_of_the_plan(push: Push, model: Qwen2ForCausalLM) -> None:
    tensors = dict(weights(model)) | {"model.norm.weight": torch.zeros(127)}
    with pytest.raises(ValueError, match=r"the plan expects model\.norm\.weight \(128,\), the model has \(127,\)"):
        push(tensors.items(), 9)


def test_server_that_refuses_does_not_hang_the_broadcast(
    push: Push, model: Qwen2ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Many buckets: the broadcasts cannot end without a receiver.
    monkeypatch.setattr(ServerAdmin, "update_weights", lambda admin, info: admin._call("POST", "/update_weights", {}))
    begun = time.monotonic()
    with pytest.raises(ServerError, match="update_weights failed"):
        push(weights(model), 9)
    assert time.monotonic() - begun < 10


def change(model: Qwen2ForCausalLM, share: float) -> None:
    """New values for a share of every parameter's."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            chosen = torch.rand(parameter.shape, generator=generator) < share
            parameter[chosen] = torch.randn(int(chosen.sum()), generator=generator) * parameter.std()


async def test_delta_push_sends_what_changed(
    running: RunningServer, connect: Callable[..., Push], model: Qwen2ForCausalLM
) -> None:
    push = connect(plan_of(running.model), way="delta")
    first = push(weights(model), 1)
    for version in (2, 3):
        change(model, 0.1)
        report = push(weights(model), version)
        assert report.bytes[0] < 0.2 * first.bytes[0]
        assert difference(model, await probe(running)) < 1e-4
    assert push(weights(model), 4).bytes[0] < 0.05 * first.bytes[0]
    push.connect()  # the server may be another one
    assert push(weights(model), 5).bytes[0] == first.bytes[0]
    assert difference(model, await probe(running)) < 1e-4


def test_flipped_bit_of_a_change_is_caught(
    running: RunningServer, connect: Callable[..., Push], model: Qwen2ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hash is that of the whole stretch: a base that differs would be found as well."""
    push = connect(plan_of(running.model), way="delta")
    push(weights(model), 1)
    change(model, 0.1)
    (sender,) = push.pusher._groups.values()
    assert isinstance(sender, DeltaSender)
    encode = sender._encoder.encode

    def damaged(*arguments: Any) -> tuple[list[int], Tensor]:
        counts, payload = encode(*arguments)
        payload[-20] ^= 1
        monkeypatch.undo()
        return counts, payload

    monkeypatch.setattr(sender._encoder, "encode", damaged)
    with pytest.raises(ServerError, match=r"tensor model\.\S+ arrived with hash"):
        push(weights(model), 2)
