"""Tokens go to the experts that they are told, and everything else is as the model's own router does it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func
from torch import Tensor
from transformers import AutoModelForCausalLM

from dapo_megatron.algorithm.advantage import group_advantages
from dapo_megatron.config.preflight import check_machine, check_plan
from dapo_megatron.config.reference_view import reference_config
from dapo_megatron.errors import UserError
from dapo_megatron.models.registry import architecture_of
from dapo_megatron.rollout.server import check_gpu_servers
from dapo_megatron.trainer.batching import Batch, PackingRules, build_batch, load_batch, plan_batch
from dapo_megatron.trainer.critic import Critic
from dapo_megatron.trainer.packing import CostModel
from dapo_megatron.trainer.parallel import Layout
from dapo_megatron.trainer.policy import Policy
from dapo_megatron.trainer.reference import Reference
from dapo_megatron.trainer.router import LayerReplay, ReplayedRouter
from dapo_megatron.trainer.routes import RouterShare
from dapo_megatron.trainer.trained import Metrics
from dapo_megatron.types import Int16
from tests.batches import make_batch, make_config, rows_of
from tests.unit.test_batching import RULES as BATCH_RULES

MODELS = ("qwen3_moe", "mixtral", "deepseek_v3")
VOCABULARY = 151

Make = Callable[..., Policy]
Gradients = dict[str, Tensor]


@pytest.fixture
def make_policy(layout: Layout, checkpoint: Callable[..., Path]) -> Make:
    """A tiny policy; arguments are the model and fields of the training section."""

    def make(family: str = "qwen3_moe", **training: Any) -> Policy:
        folder = checkpoint(family, tied=family == "qwen3_moe")
        return Policy(make_config(folder, training={"micro_batch_tokens": 96} | training), layout)

    return make


def batch_of(policy: Policy, routes: Int16 | None = None, seed: int = 0) -> Batch:
    """A batch with advantages, of answers that came with these routes."""
    header, tokens = make_batch(VOCABULARY, seed=seed)
    if routes is not None:
        tokens = replace(tokens, routes=routes)
    batch = load_batch(header, policy.packing, policy.layout, lambda _: tokens)
    batch.set_advantages(group_advantages(torch.from_numpy(header.rewards), torch.from_numpy(header.groups)))
    return batch


def same_route(policy: Policy, *layers: tuple[int, ...]) -> Int16:
    """All tokens of `batch_of` through the same experts, given layer by layer."""
    _, tokens = make_batch(VOCABULARY)
    count = len(tokens.prompt_tokens) + len(tokens.response_tokens)
    return np.tile(np.array(layers, np.int16), (count, 1, 1))


def step(policy: Policy, batch: Batch) -> tuple[Tensor, Metrics, Gradients]:
    """Log-probs of all tokens, metrics and gradients of the only mini-batch, from the policy as it is."""
    old = policy.log_probs(batch)
    batch.set_old_log_probs(old)
    return torch.cat(old), *gradients(policy, batch)


def gradients(policy: Policy, batch: Batch) -> tuple[Metrics, Gradients]:
    (mini_batch,) = batch.mini_batches()
    metrics = policy.gradients(mini_batch)
    return metrics, {name: p.main_grad.clone() for name, p in policy.chunks[0].named_parameters()}


def move(policy: Policy) -> None:
    """Other weights, under which many tokens would take another route."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.chunks[0].named_parameters():
            if name.endswith("router.weight"):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std())


def equal(found: Gradients, expected: Gradients) -> list[str]:
    """Names of gradients that are not the same bit by bit."""
    assert found.keys() == expected.keys()
    return [name for name, gradient in expected.items() if not torch.equal(found[name], gradient)]


def experts_with_gradients(found: Gradients, layer: int) -> set[int]:
    prefix = f"decoder.layers.{layer}.mlp.experts.local_experts."
    return {int(name.split(".")[6]) for name, g in found.items() if name.startswith(prefix) and bool(g.any())}


def routers(policy: Policy | Critic) -> list[ReplayedRouter]:
    return [module for module in policy.chunks[0].modules() if isinstance(module, ReplayedRouter)]


@pytest.mark.parametrize("family", MODELS)
def test_routes_of_the_routers_own_choice_change_nothing(make_policy: Make, family: str) -> None:
    """Bit by bit, padding included."""
    log_probs, metrics, expected = step(policy := make_policy(family, sequence_multiple=4), batch_of(policy))
    replayed = make_policy(family, router_replay="R2", sequence_multiple=4)
    batch = batch_of(replayed)
    found_log_probs, found_metrics, found = step(replayed, batch)
    assert torch.equal(found_log_probs, log_probs)
    assert found_metrics == metrics | {"router_mismatch": 0.0}
    assert equal(found, expected) == []
    for micro in batch.micro_batches():
        assert micro.routes is not None
        assert torch.equal((micro.routes >= 0).all(-1).all(-1), micro.routed)
        assert not micro.routed.all()


def test_forced_routes_train_the_forced_experts_and_the_router(make_policy: Make) -> None:
    """Layer by layer, and no other expert."""
    policy = make_policy(router_replay="R3")
    layers = [(1, 4), (0, 2), (7, 3), (5, 6)]
    log_probs, metrics, found = step(policy, batch_of(policy, same_route(policy, *layers)))
    own, _, _ = step(free := make_policy(), batch_of(free))
    assert (log_probs - own).abs().max() > 0.01
    assert 0.5 < metrics["router_mismatch"] < 1
    for layer, experts in enumerate(layers):
        assert experts_with_gradients(found, layer) == set(experts)
        router = found[f"decoder.layers.{layer}.mlp.router.weight"]
        assert {int(expert) for expert in router.any(1).nonzero()} == set(experts)


def test_layers_without_experts_have_no_routes(make_policy: Make) -> None:
    policy = make_policy("deepseek_v3", router_replay="R3")
    layers = [(0, 1, 2, 3), (8, 9, 10, 11), (4, 5, 6, 7)]
    _, _, found = step(policy, batch_of(policy, same_route(policy, *layers)))
    assert experts_with_gradients(found, 0) == set()
    for layer, experts in enumerate(layers):
        assert experts_with_gradients(found, layer + 1) == set(experts)


def router_scores(kind: str, logits: Tensor, chosen: Tensor) -> Tensor:
    """What the experts' outputs are weighed with, [t, k], from the published definitions."""
    if kind == "normalised":
        return logits.gather(1, chosen).softmax(1)
    if kind == "plain":
        return logits.softmax(1).gather(1, chosen)
    scores = logits.sigmoid().gather(1, chosen)
    return scores / scores.sum(1, keepdim=True) * 2.5


@pytest.mark.parametrize("kind", ["normalised", "plain", "sigmoid"])
def test_scores_come_from_the_routers_own_logits(make_policy: Make, kind: str) -> None:
    """With their gradients, and whatever biases and groups would have chosen."""
    policy = make_policy("deepseek_v3" if kind == "sigmoid" else "qwen3_moe", router_replay="R3")
    router = routers(policy)[0]
    router.config.moe_router_pre_softmax = kind == "plain"
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 1, router.num_experts, generator=random, requires_grad=True)
    chosen = torch.stack([torch.randperm(router.num_experts, generator=random)[: router.topk] for _ in range(6)])
    assert router.router_replay is not None
    router.router_replay.begin(chosen.to(torch.int16), trains=True)
    probs, routing_map = router.routing(logits)
    weights = torch.randn(probs.shape, generator=random)
    (found,) = torch.autograd.grad((probs * weights).sum(), logits)
    expected = torch.zeros_like(probs).scatter(1, chosen, router_scores(kind, logits[:, 0], chosen))
    assert torch.allclose(probs, expected, atol=1e-6)
    assert torch.equal(routing_map, expected > 0)
    (gradient,) = torch.autograd.grad((expected * weights).sum(), logits)
    assert torch.allclose(found, gradient, atol=1e-6)


def test_load_balancing_counts_tokens_where_they_were_sent(make_policy: Make) -> None:
    policy = make_policy(router_replay="R3", moe_aux_loss=0.1)
    router = routers(policy)[0]
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(10, 1, router.num_experts, generator=random, requires_grad=True)
    assert router.router_replay is not None
    router.router_replay.begin(torch.tensor([[3, 0]], dtype=torch.int16).expand(10, 2), trains=True)
    probs, _ = router.routing(logits)
    (found,) = torch.autograd.grad((probs * 0).sum(), logits)
    counts = torch.tensor([10, 0, 0, 10, 0, 0, 0, 0])
    loss = switch_load_balancing_loss_func(
        logits[:, 0].softmax(1), counts, 10, topk=2, num_experts=8, moe_aux_loss_coeff=0.1
    )
    (expected,) = torch.autograd.grad(loss * 10, logits)  # megatron divides by the tokens later
    assert torch.allclose(found, expected, atol=1e-7)


def test_the_router_chooses_where_no_route_is_known(make_policy: Make) -> None:
    policy, free = make_policy(router_replay="R3"), make_policy()
    unknown = same_route(policy, *[(-1, -1)] * 4)
    log_probs, metrics, found = step(policy, batch_of(policy, unknown))
    own, _, expected = step(free, batch_of(free))
    assert torch.equal(log_probs, own)
    assert equal(found, expected) == []
    assert metrics["router_mismatch"] == 0.0
    unknown[::2] = same_route(policy, *[(1, 4)] * 4)[::2]
    half, metrics, _ = step(policy, batch_of(policy, unknown))
    assert not torch.equal(half, own)
    assert 0.5 < metrics["router_mismatch"] < 1  # of the tokens with a route


def test_mismatch_compares_sets_of_experts_of_tokens_with_a_route() -> None:
    replay = LayerReplay()
    scores = torch.tensor([[0.1, 0.4, 0.3]] * 4)  # the router's own: 1 and 2
    replay.begin(torch.tensor([[2, 1], [0, 1], [-1, -1], [1, 2]], dtype=torch.int16), trains=True)
    values, experts = replay.get_replay_topk(scores, 2, default_compute_topk=topk)
    assert experts.tolist() == [[2, 1], [0, 1], [1, 2], [1, 2]]
    assert torch.equal(values, scores.gather(1, experts))
    assert replay.counts.tolist() == [1.0, 3.0]
    replay.begin(torch.tensor([[0, 1]] * 4, dtype=torch.int16), trains=False)
    replay.get_replay_topk(scores, 2, default_compute_topk=topk)
    assert replay.counts.tolist() == [1.0, 3.0]  # of training passes alone


def checksum(batch: Batch) -> float:
    """A number that changes with a route of a batch."""
    routes = [micro.routes for micro in batch.micro_batches()]
    return sum(
        float((route * torch.arange(1, route.numel() + 1).view_as(route)).sum())
        for route in routes
        if route is not None
    )


def topk(scores: Tensor, k: int, num_groups: int | None = None, group_topk: int | None = None) -> tuple[Tensor, Tensor]:
    values, experts = torch.topk(scores, k, dim=1)
    return values, experts


def test_update_takes_the_routes_of_the_old_log_probs(make_policy: Make) -> None:
    """R2, when the weights have moved since."""
    policy, free = make_policy(router_replay="R2"), make_policy()
    batch = batch_of(policy)
    _, at_start, _ = step(policy, batch)
    move(policy)
    move(free)
    metrics, found = gradients(policy, batch)
    assert at_start["router_mismatch"] == 0
    assert metrics["router_mismatch"] > 0.1

    again = batch_of(policy)
    policy.log_probs(again)
    assert checksum(again) != checksum(batch)

    forced = make_policy(router_replay="R3")
    move(forced)
    given = batch_of(forced)
    for micro, before in zip(given.micro_batches(), batch.micro_batches(), strict=True):
        micro.old_log_probs, micro.routes = before.old_log_probs, before.routes
    expected_metrics, expected = gradients(forced, given)
    assert metrics == expected_metrics
    assert equal(found, expected) == []
    unforced = batch_of(free)
    unforced.set_old_log_probs([micro.old_log_probs for micro in batch.micro_batches()])
    assert equal(found, gradients(free, unforced)[1])
    policy.log_probs(batch)
    assert checksum(batch) == checksum(again)


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute": "full"},
        {"recompute": "selective", "recompute_modules": ["moe", "layernorm"]},
        {"recompute": "selective"},
    ],
    ids=["full", "experts", "attention"],
)
def test_recomputed_layers_send_tokens_the_same_way(make_policy: Make, recompute: dict[str, Any]) -> None:
    """Each of several micro-batches its own."""
    outcomes = []
    for training in ({}, recompute):
        policy = make_policy(router_replay="R2", **training)
        batch = batch_of(policy)
        step(policy, batch)
        move(policy)
        outcomes.append(gradients(policy, batch))
    assert len(batch.micro_batches()) > 2
    assert outcomes[0][0] == outcomes[1][0]
    for name, gradient in outcomes[0][1].items():
        assert (outcomes[1][1][name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_what_is_not_computed_again_is_an_error(make_policy: Make) -> None:
    policy = make_policy(router_replay="R3")
    replay = routers(policy)[0].router_replay
    assert replay is not None
    assert policy.replay is not None
    replay.begin(torch.zeros(2, 1, dtype=torch.int16), trains=True)
    with torch.no_grad():
        replay.get_replay_topk(torch.zeros(2, 3), 1, default_compute_topk=topk)
    with pytest.raises(RuntimeError, match="was to route 1 times"):
        policy.replay.mismatch()


def test_answers_without_routes_can_be_scored_but_not_trained_on(make_policy: Make) -> None:
    policy, free = make_policy(router_replay="R3"), make_policy()
    batch = batch_of(policy)
    batch.set_old_log_probs(policy.log_probs(batch))
    assert torch.equal(torch.cat(policy.log_probs(batch)), torch.cat(free.log_probs(batch_of(free))))
    with pytest.raises(UserError, match=r"training\.router_replay: the answers came without routes"):
        gradients(policy, batch)


def test_reference_and_critic_choose_for_themselves(layout: Layout, checkpoint: Callable[..., Path]) -> None:
    """Also where their passes run on micro-batches that have routes."""
    sections: dict[str, Any] = {
        "training": {"micro_batch_tokens": 96, "router_replay": "R3"},
        "algorithm": {"kl": {"coefficient": 0.1}},
    }
    config = make_config(checkpoint("qwen3_moe"), **sections)
    free = make_config(checkpoint("qwen3_moe"), training={"micro_batch_tokens": 96})
    policy = Policy(config, layout)
    batch = batch_of(policy, same_route(policy, *[(1, 4)] * 4))
    own = torch.cat(Policy(free, layout).log_probs(batch_of(policy)))
    assert torch.equal(torch.cat(Reference(config, layout).log_probs(batch)), own)
    assert not torch.equal(torch.cat(policy.log_probs(batch)), own)
    assert PackingRules.of(reference_config(config), policy.arch, layout).routers is None
    assert {router.router_replay for router in routers(Critic(config, layout))} == {None}


def numbered(share: RouterShare) -> tuple[Batch, Int16]:
    """A batch of `tests.batches` whose tokens, from 1, and whose experts in every layer say where the token stands."""
    header, block = make_batch(VOCABULARY)
    ends = np.cumsum(block.prompt_lengths + block.response_lengths)
    places = np.split(np.arange(ends[-1]) + 1, ends[:-1])
    parts = list(zip(places, block.prompt_lengths, strict=True))
    count = np.arange(ends[-1])[:, None]
    first = count * share.model_layers + np.arange(share.model_layers)
    routes = np.stack([first, first + share.experts // 2], -1).astype(np.int16)
    block = replace(
        block,
        prompt_tokens=np.concatenate([place[:n] for place, n in parts]).astype(np.int32),
        response_tokens=np.concatenate([place[n:] for place, n in parts]).astype(np.int32),
        routes=routes,
    )
    rules = replace(RULES, routers=share)
    batch = build_batch(
        header, plan_batch(header, rules), block, rules, data_rank=0, context_rank=1, device=torch.device("cpu")
    )
    return batch, routes


RULES = replace(BATCH_RULES, context=2, sequence_multiple=12, total_multiple=24, cost=CostModel(1000.0))


@pytest.mark.parametrize("part", [0, 1, 2])
def test_every_token_gets_its_own_route(part: int) -> None:
    """Of the layers here, on its context-parallel rank, in its stretch of a sequence-parallel rank."""
    share = RouterShare(layers=(2, 0), model_layers=3, experts=4000, per_token=2, parts=3, part=part)
    batch, routes = numbered(share)
    for micro in batch.micro_batches():
        tokens = np.split(micro.input_ids[0].numpy(), 3)[part]
        assert micro.routes is not None
        assert micro.routes.dtype == torch.int16
        real = micro.routed.numpy()
        assert np.array_equal(real, tokens > 0)
        assert np.array_equal(micro.routes[real].numpy(), routes[tokens[real] - 1][:, [2, 0]])
        assert bool((micro.routes[~real] == -1).all())


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ([[[1, 1]] * 3], "route \\[1, 1\\] is not made of different experts of 8"),
        ([[[1, 8]] * 3], "different experts"),
        ([[[-1, 3]] * 3], "different experts"),
        ([[[1, 2]] * 2], r"routes of shape \(1, 2, 2\) do not fit \(3, 2\)"),
        ([[[1, 2, 3]] * 3], "do not fit"),
    ],
)
def test_routes_of_another_model_are_refused(routes: list[Any], message: str) -> None:
    """One that sends a token to fewer experts than megatron counts on would hang the ranks."""
    share = RouterShare(layers=(0, 1, 2), model_layers=3, experts=8, per_token=2, parts=1, part=0)
    with pytest.raises(RuntimeError, match=message):
        share.take(np.array(routes, np.int16), np.zeros(4, np.int64), torch.device("cpu"))


SHARES: list[tuple[str, dict[str, Any], int, tuple[int, ...]]] = [
    ("qwen3_moe", {}, 0, (0, 1, 2, 3)),
    ("qwen3_moe", {"pipeline": 2}, 1, (2, 3)),
    ("qwen3_moe", {"pipeline": 2, "virtual_pipeline": 2}, 0, (0, 2)),
    ("qwen3_moe", {"pipeline": 2, "virtual_pipeline": 2}, 1, (1, 3)),
    ("deepseek_v3", {"pipeline": 2, "virtual_pipeline": 2}, 0, (1,)),
    ("deepseek_v3", {"pipeline": 2, "virtual_pipeline": 2}, 1, (0, 2)),
    ("deepseek_v3", {"pipeline": 2, "pipeline_layers": [3, 1]}, 0, (0, 1)),
    ("deepseek_v3", {"pipeline": 2, "pipeline_layers": [1, 3]}, 0, ()),
]


@pytest.mark.parametrize(("family", "sizes", "stage", "layers"), SHARES)
def test_layers_of_a_stage(
    layout: Layout, checkpoint: Callable[..., Path], family: str, sizes: dict[str, Any], stage: int, layers: Any
) -> None:
    folder = checkpoint(family, tied=family == "qwen3_moe")
    config = make_config(folder, training={"router_replay": "R3"}, parallel=sizes | {"tensor": 2, "sequence": True})
    share = RouterShare.of(config, architecture_of(folder), replace(layout, pipeline_rank=stage, tensor_rank=1))
    assert share is not None
    assert share.layers == layers
    assert (share.parts, share.part) == (2, 1)


def test_routes_of_another_implementation(make_policy: Make) -> None:
    """transformers as the engine: in fp32 it chooses as the trainer does; with noise, its routes explain a part of the
    difference between the two.
    """
    policy, free = make_policy(router_replay="R3"), make_policy()
    model = AutoModelForCausalLM.from_pretrained(policy.config.model.path, dtype=torch.float32).eval()
    batch, _, engine = engine_answers(policy, model)
    log_probs, metrics, _ = step(policy, batch)
    assert metrics["router_mismatch"] == 0.0
    assert (log_probs - engine).abs().max() < 1e-4
    with torch.no_grad():
        random = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():
            if "gate.weight" in name:
                parameter.add_(torch.randn(parameter.shape, generator=random) * parameter.std() * 0.1)
    batch, unrouted, engine = engine_answers(policy, model)
    log_probs, metrics, _ = step(policy, batch)
    assert 0.01 < metrics["router_mismatch"] < 0.5
    own = torch.cat(free.log_probs(load_batch(unrouted.header, free.packing, free.layout, unrouted.fetch)))
    assert (log_probs - engine).abs().mean() < 0.7 * (own - engine).abs().mean()


@torch.no_grad()
def engine_answers(policy: Policy, model: Any) -> tuple[Batch, Batch, Tensor]:
    """A batch with a model's routes, the same without, and the model's log-probs in the order of the batch's tokens."""
    _, block = make_batch(VOCABULARY)
    routes, log_probs = [], {}
    for response, (prompt, answer, _) in rows_of(block).items():
        ids = torch.from_numpy(np.concatenate([prompt, answer])).long()
        out = model(ids[None], output_router_logits=True)
        chosen = [logits.topk(policy.arch.experts_per_token).indices for logits in out.router_logits]
        routes.append(torch.stack(chosen, 1).numpy().astype(np.int16))
        each = out.logits[0].float().log_softmax(-1)
        log_probs[response] = each[torch.arange(len(prompt) - 1, len(ids) - 1), ids[len(prompt) :]]
    batch = batch_of(policy, np.concatenate(routes))
    order = [(micro.responses.tolist(), micro.places.tolist()) for micro in batch.micro_batches()]
    own = [log_probs[r][place] for responses, places in order for r, place in zip(responses, places, strict=True)]
    return batch, batch_of(policy), torch.stack(own)


def test_rules_of_the_configuration(checkpoint: Callable[..., Path]) -> None:
    replayed = {"training": {"router_replay": "R2"}}
    with pytest.raises(ValueError, match=r"algorithm\.old_log_probs \(rollout\) must be recompute with training"):
        make_config("unused", **replayed, algorithm={"old_log_probs": "rollout"})
    replayed = {"training": {"router_replay": "R3"}}
    with pytest.raises(ValueError, match=r"fleet\.pipeline \(2\) must be 1 with training\.router_replay=R3"):
        make_config("unused", **replayed, fleet={"pipeline": 2})
    make_config("unused", **replayed, algorithm={"old_log_probs": "rollout"})
    dense = checkpoint("qwen2")
    with pytest.raises(UserError, match=r"training\.router_replay=R3: .* has no experts; use off"):
        check_plan(make_config(dense, **replayed), 1, architecture_of(dense))
    experts = checkpoint("qwen3_moe")
    check_plan(make_config(experts, **replayed), 1, architecture_of(experts))


def test_servers_on_a_cpu_return_no_routes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("dapo_megatron.config.preflight.check_fleet", lambda fleet: None)
    config = make_config(tmp_path, run={"dir": str(tmp_path), "steps": 1}, training={"router_replay": "R3"})
    monkeypatch.setattr("dapo_megatron.rollout.server.runs_on_cpu", lambda python: True)
    with pytest.raises(UserError, match=r"training\.router_replay=R3 needs servers on GPUs"):
        check_machine(config, 1)
    monkeypatch.setattr("dapo_megatron.rollout.server.runs_on_cpu", lambda python: False)
    check_gpu_servers(None, "no reason to be refused")
