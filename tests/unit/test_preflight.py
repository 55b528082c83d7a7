"""Bad input is refused before any process starts, in one sentence that names it."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from config_helpers import write_config, write_model

from dapo_megatron.config import preflight as checks
from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.config.load import load_config
from dapo_megatron.config.preflight import check_host, preflight
from dapo_megatron.config.training import ParallelConfig
from dapo_megatron.errors import UserError
from tests import stub_server
from tests.stub_server import stub

PPO = "algorithm.advantage.estimator=gae"


def check(folder: Path, *overrides: str, num_ranks: int = 1, **sections: Any) -> None:
    preflight(load_config(write_config(folder, **sections), overrides), num_ranks)


def message(folder: Path, *overrides: str, num_ranks: int = 1, **sections: Any) -> str:
    with pytest.raises(UserError) as caught:
        check(folder, *overrides, num_ranks=num_ranks, **sections)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    return tmp_path


def test_good_input_passes(folder: Path) -> None:
    check(folder)
    check(folder, "parallel.tensor=3", "parallel.pipeline=2", num_ranks=6)


def test_single_file_model_passes(folder: Path) -> None:
    model = folder / "model"
    (model / "model.safetensors.index.json").unlink()
    (model / "model-00002-of-00002.safetensors").rename(model / "model.safetensors")
    check(folder)


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


SHARD = "model-00002-of-00002.safetensors"
DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (lambda model: model.rename(model.parent / "elsewhere"), "model does not exist"),
    (lambda model: (model / "config.json").unlink(), "config.json does not exist"),
    (lambda model: (model / "config.json").write_text("{"), "config.json is not valid JSON"),
    (lambda model: (model / "tokenizer.json").unlink(), "has no tokenizer.json"),
    (lambda model: (model / "tokenizer.json").write_text("{"), "tokenizer.json cannot be read"),
    (lambda model: (model / "tokenizer_config.json").unlink(), "has no tokenizer_config.json"),
    (lambda model: (model / "model.safetensors.index.json").unlink(), "has neither model.safetensors nor"),
    (lambda model: (model / "model.safetensors.index.json").write_text("[]"), "is not an index with a `weight_map`"),
    (lambda model: (model / SHARD).unlink(), f"{SHARD} is missing, but model.safetensors.index.json names it"),
    (lambda model: cut(model / SHARD, 4), f"{SHARD} is not a complete safetensors file"),
    (lambda model: cut(model / SHARD, 40), f"{SHARD} is not a complete safetensors file"),
    (lambda model: cut(model / SHARD, (model / SHARD).stat().st_size - 8), f"{SHARD} is cut off or damaged"),
]


@pytest.mark.parametrize(("damage", "expected"), DAMAGE, ids=[expected for _, expected in DAMAGE])
def test_half_written_model(folder: Path, damage: Callable[[Path], object], expected: str) -> None:
    damage(folder / "model")
    text = message(folder)
    assert text.startswith("model.path: ")
    assert expected in text


def test_tensor_that_the_index_promises_but_the_shard_lacks(folder: Path) -> None:
    index = folder / "model/model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["c.weight"] = SHARD
    index.write_text(json.dumps(content))
    assert f"{SHARD} lacks the tensor c.weight" in message(folder)


@pytest.fixture
def megatron(folder: Path) -> Path:
    """The model's folder, with a Megatron checkpoint in place of safetensors."""
    model = folder / "model"
    for file in model.glob("*.safetensors*"):
        file.unlink()
    for name in (".metadata", "metadata.json", "common.pt", "__0_0.distcp"):
        (model / name).touch()
    return model


def test_megatron_checkpoint_passes(folder: Path, megatron: Path) -> None:
    check(folder)
    check(folder, PPO, f"critic.path={megatron}")


@pytest.mark.parametrize("name", [".metadata", "metadata.json", "common.pt", "*.distcp"])
def test_incomplete_megatron_checkpoint(folder: Path, megatron: Path, name: str) -> None:
    for file in megatron.glob(name):
        file.unlink()
    assert message(folder) == f"model.path: {megatron} has no {name}: it is no complete Megatron checkpoint"


def test_unknown_architecture(tmp_path: Path) -> None:
    write_model(tmp_path / "model", architectures=["MambaForCausalLM"])
    text = message(tmp_path)
    assert "MambaForCausalLM" in text
    assert "Qwen2ForCausalLM, Qwen3ForCausalLM" in text


def test_tensor_parallel_size_must_divide_heads(folder: Path) -> None:
    expected = "parallel.tensor=2 does not divide 9 attention heads and 3 key/value heads of model; use 1 or 3"
    assert message(folder, "parallel.tensor=2", num_ranks=2) == expected


def test_tensor_parallel_size_must_divide_the_mlp(tmp_path: Path) -> None:
    write_model(tmp_path / "model", intermediate_size=97)
    assert "parallel.tensor=3 does not divide the MLP size 97" in message(tmp_path, "parallel.tensor=3", num_ranks=3)


def test_pipeline_must_divide_layers(folder: Path) -> None:
    text = message(folder, "parallel.pipeline=4", num_ranks=4)
    assert text == (
        "parallel.pipeline=4 does not divide 6 layers of model; use 1, 2, 3 or 6, or say in parallel.pipeline_layers "
        "how many each has"
    )


def test_ranks_must_be_whole_copies(folder: Path) -> None:
    assert message(folder, "parallel.tensor=3", num_ranks=4).startswith("--nproc 4 is not a multiple of")


def test_longest_sequence_must_fit_the_model(folder: Path) -> None:
    text = message(folder, "rollout.max_tokens=200")
    assert "data.max_prompt_tokens + rollout.max_tokens = 328 is more than the 256 positions" in text


def test_so_must_answers_that_may_go_past_the_most_tokens(folder: Path) -> None:
    longer = ["algorithm.overlong.shift=past_max", "algorithm.overlong.cache_tokens=121"]
    text = message(folder, *longer)
    assert "rollout.max_tokens + algorithm.overlong.cache_tokens = 257 is more than the 256 positions" in text


def rows(folder: Path, *lines: dict[str, Any]) -> dict[str, Any]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"train": {"path": str(path)}, "max_prompt_tokens": 8}


GOOD_ROW = {"prompt": "1 + 1 =", "reward_model": {"ground_truth": "2"}}


def test_data_file(folder: Path) -> None:
    check(folder, data=rows(folder, GOOD_ROW))


def test_row_without_gold_answer_is_named(folder: Path) -> None:
    text = message(folder, data=rows(folder, GOOD_ROW, {"prompt": "1 + 2 =", "reward_model": {}}))
    assert "row 2" in text
    assert "rows.jsonl" in text
    assert "ground_truth" in text


def test_missing_data_file(folder: Path) -> None:
    data = {"train": {"path": str(folder / "nowhere.jsonl")}, "max_prompt_tokens": 8}
    assert "nowhere.jsonl does not exist" in message(folder, data=data)


def test_empty_data_file(folder: Path) -> None:
    assert "has no rows" in message(folder, data=rows(folder))


def test_prompts_that_are_all_too_long(folder: Path) -> None:
    long_row = {"prompt": "1 + 1 + 1 + 1 =", "reward_model": {"ground_truth": "4"}}
    check(folder, data=rows(folder, long_row, GOOD_ROW))
    assert "every prompt is longer than data.max_prompt_tokens=8" in message(folder, data=rows(folder, long_row))


def test_held_out_data_is_checked_too(folder: Path) -> None:
    evaluation = {"data": {"path": str(folder / "held_out.jsonl")}}
    assert "held_out.jsonl" in message(folder, evaluation=evaluation)


def test_port_in_use(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        text = message(folder, f"fleet.port={port}")
    assert text == f"fleet.port={port}: port {port} on 127.0.0.1 is in use or cannot be bound"
    check(folder, f"fleet.port={port}")


def test_every_server_needs_its_port(folder: Path) -> None:
    for _ in range(20):  # another process may have the port before the one that was given
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            if f"port {port} on" in message(folder, f"fleet.port={port - 1}", "fleet.servers=2"):
                return
    pytest.fail("the second server's port is never named")


@pytest.mark.parametrize(
    ("module", "override", "expected"),
    [
        ("vllm", "fleet.servers=1", "vLLM is not installed: run `make setup`"),
        ("wandb", "tracking.wandb_project=p", "tracking.wandb_project is set, but wandb is not installed"),
    ],
)
def test_missing_package(
    folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, override: str, expected: str
) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == module else object())
    assert expected in message(folder, override)


def test_server_layout_must_divide_heads(folder: Path) -> None:
    assert message(folder, "fleet.tensor=2") == "fleet.tensor=2 does not divide 9 attention heads"


EXTERNAL = "fleet.mode=external"


def test_external_servers_are_asked_before_anything_starts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == "vllm" else object())  # none is needed here
    file = folder / "urls"
    listed = (EXTERNAL, f"fleet.urls_file={file}")
    assert "the environment variable DAPO_SERVER_TOKEN (fleet.token_env) holds no token" in message(folder, *listed)
    monkeypatch.setenv("DAPO_SERVER_TOKEN", stub_server.TOKEN)
    assert message(folder, *listed).startswith(f"fleet.urls_file: {file} cannot be read")
    file.write_text("# none yet\n")
    assert message(folder, *listed).startswith(f"fleet.urls_file: {file} names no server")
    file.write_text("node7\n")
    assert message(folder, *listed) == f"fleet.urls_file: {file}: 'node7' must look like http://10.0.0.7:8000"
    with stub() as url:
        file.write_text(f"{url}\n")
        check(folder, *listed)
        check(folder, EXTERNAL, "fleet.hosts=127.0.0.[1-1]", f"fleet.port={url.rpartition(':')[2]}")
        text = message(folder, EXTERNAL, f"fleet.urls=[{url}]", "fleet.pipeline=2")
        assert text == f"fleet.urls: server {url} has 1 workers, but fleet.tensor=1 x fleet.pipeline=2 is 2"
    assert message(folder, *listed).startswith(f"fleet.urls_file: server {url} does not answer (ConnectError")


def test_weights_do_not_leave_a_node_from_a_loopback_address(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    away = FleetConfig(mode="external", urls=["http://127.0.0.1:8000", "http://10.0.0.7:8000"])
    with pytest.raises(UserError, match=r"fleet.host=127.0.0.1: .* the server http://10.0.0.7:8000 cannot reach it"):
        check_host(away)
    check_host(away.model_copy(update={"host": "10.0.0.1"}))
    check_host(FleetConfig(mode="external", urls=["http://localhost:8000"]))
    for variable, value in (("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "1"), ("MASTER_ADDR", "10.0.0.1")):
        monkeypatch.setenv(variable, value)
    assert "trainer ranks of other nodes cannot reach it" in message(folder, num_ranks=2)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.2")  # one machine stands for all nodes
    check(folder, num_ranks=2)


def test_colocated_servers_fill_the_gpus_of_one_node(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(folder, "fleet.mode=colocated")
    check(folder, "fleet.mode=colocated", "fleet.pipeline=3", num_ranks=3)
    text = message(folder, "fleet.mode=colocated", "fleet.pipeline=3")
    assert text.startswith("fleet.mode=colocated: servers of fleet.tensor=1 x fleet.pipeline=3 GPUs do not fill")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert message(folder, "fleet.mode=colocated", num_ranks=2).startswith("fleet.mode=colocated runs on one node")


def test_fp8_needs_servers_on_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dapo_megatron.sync.proof.quantized_matrices", lambda arch: ())  # the tiny model has none
    fp8 = ("fleet.weight_format=fp8_block", "fleet.dtype=bfloat16")
    assert "vLLM has no such kernels for a CPU" in message(folder, *fp8)
    monkeypatch.setattr(checks, "check_gpu_servers", lambda python, why: None)
    check(folder, *fp8)


def test_replay_needs_recorded_batches_and_nothing_of_the_fleet(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    recorded = folder / "rollouts"
    assert "holds no recorded batches" in message(folder, f"rollout.replay={recorded}")
    recorded.mkdir()
    (recorded / "step_000001.npz").touch()
    check(folder, f"rollout.replay={recorded}")


def saved_state(run_dir: Path, **run: Any) -> Path:
    state = run_dir / "state/step_000002"
    state.mkdir(parents=True)
    (state / "manifest.json").write_text("{}")
    saved = {"step": 2, "layout": ParallelConfig.model_validate({}).layout(2)} | run
    (state / "run.json").write_text(json.dumps(saved))
    (run_dir / "state/latest").write_text("step_000002\n")
    return state


def test_resume_needs_the_same_layout(folder: Path) -> None:
    state = saved_state(folder / "run")
    check(folder, num_ranks=2)
    assert message(folder, num_ranks=1) == (
        f"run.resume: {state} was saved with the layout data=2, this run has data=1, and the optimizer's state in it "
        "fits the former alone: resume it there once with run.steps=2, which writes it again for every layout"
    )


def test_state_for_every_layout_needs_no_same_one(folder: Path) -> None:
    saved_state(folder / "run", optimizer="fully_reshardable")
    check(folder, "parallel.tensor=3", num_ranks=3)


def test_saved_state_that_says_no_layout(folder: Path) -> None:
    state = saved_state(folder / "run")
    (state / "run.json").write_text("{}")
    assert message(folder) == f"saved state {state} is damaged: run.json has no 'layout'"


def test_resume_never_refuses_a_saved_state(folder: Path) -> None:
    saved_state(folder / "run")
    assert "run.resume=never" in message(folder, "run.resume=never", num_ranks=2)


def test_run_folder_must_be_a_folder(folder: Path) -> None:
    (folder / "run").write_text("")
    assert "run.dir" in message(folder)


def test_critic_of_its_own_checkpoint(folder: Path) -> None:
    """It may have other layers, but reads the same tokens."""
    write_model(folder / "critic", intermediate_size=192)
    check(folder, PPO, f"critic.path={folder / 'critic'}")
    check(folder, PPO)
    check(folder, f"critic.path={folder / 'nowhere'}")  # there is no critic


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"vocab_size": 65}, "has a vocabulary of 65 tokens, "),
        ({"max_position_embeddings": 130}, "= 136 is more than the 130 positions of "),
        ({"num_hidden_layers": 5}, "parallel.pipeline=2 does not divide 5 layers of critic"),
    ],
)
def test_critic_that_does_not_fit(folder: Path, changes: dict[str, Any], expected: str) -> None:
    write_model(folder / "critic", **changes)
    text = message(folder, PPO, "parallel.pipeline=2", f"critic.path={folder / 'critic'}", num_ranks=2)
    assert expected in text


def test_critic_that_is_not_there_is_named(folder: Path) -> None:
    nowhere = folder / "nowhere"
    assert message(folder, PPO, f"critic.path={nowhere}") == f"critic.path: the folder {nowhere} does not exist"


def test_critic_with_another_tokenizer(folder: Path) -> None:
    write_model(folder / "critic")
    file = folder / "critic" / "tokenizer.json"
    file.write_text(file.read_text().replace('"A":33', '"a":33').replace('"A": 33', '"a": 33'))
    text = message(folder, PPO, f"critic.path={folder / 'critic'}")
    assert text.startswith(f"critic.path: {folder / 'critic'} has another tokenizer than {folder / 'model'}: 'A' is")


KL = {"algorithm": {"kl": {"coefficient": 0.1}}}


def reference_message(folder: Path, *, num_ranks: int = 1, **reference: Any) -> str:
    return message(folder, num_ranks=num_ranks, **KL, reference=reference)


def test_reference_that_fits(folder: Path) -> None:
    other = write_model(folder / "other", num_attention_heads=8, num_key_value_heads=4)
    reference = {"path": str(other), "parallel": {"tensor": 2}, "precision": "fp32"}
    check(folder, num_ranks=6, **KL, reference=reference)
    (other / "tokenizer.json").unlink()  # the policy's is read
    check(folder, num_ranks=6, **KL, reference=reference)


def test_reference_layout(folder: Path) -> None:
    expected = (
        "reference.parallel.tensor=2 does not divide 9 attention heads and 3 key/value heads of model; use 1 or 3"
    )
    assert reference_message(folder, num_ranks=2, parallel={"tensor": 2}) == expected
    text = reference_message(folder, num_ranks=2, parallel={"pipeline": 3})
    assert text.startswith("--nproc 2 is not a multiple of reference.parallel.tensor x reference.parallel.pipeline x")
    check(folder, num_ranks=2, reference={"parallel": {"tensor": 2}})  # nothing has a reference


def test_reference_in_the_layout_of_the_policy(folder: Path) -> None:
    """The key that is wrong is the policy's."""
    other = write_model(folder / "other", num_attention_heads=8, num_key_value_heads=4)
    overrides = ["parallel.tensor=3"]
    text = message(folder, *overrides, num_ranks=3, **KL, reference={"path": str(other)})
    assert text.startswith("parallel.tensor=3 does not divide 8 attention heads and 4 key/value heads of other")


def test_reference_precision(folder: Path) -> None:
    training = {"mini_batch": 8, "micro_batch_tokens": 512, "layer_backend": "te"}
    text = message(folder, **KL, reference={"precision": "fp32"}, training=training)
    assert text.startswith(
        "training.layer_backend=te has no attention over packed sequences in reference.precision=fp32"
    )


def test_reference_model_is_checked(folder: Path) -> None:
    assert reference_message(folder, path=str(folder / "nowhere")).startswith("reference.path: the folder ")
    other = write_model(folder / "other")
    cut(other / SHARD, 40)
    assert reference_message(folder, path=str(other)).startswith(f"reference.path: {other / SHARD} is not a complete")
    short = write_model(folder / "short", max_position_embeddings=100)
    assert reference_message(folder, path=str(short)).endswith(f"is more than the 100 positions of {short}")


def test_reference_has_the_vocabulary_of_the_policy(folder: Path) -> None:
    larger = write_model(folder / "larger", vocab_size=65)
    text = reference_message(folder, path=str(larger))
    assert text.startswith(f"reference.path: {larger} has a vocabulary of 65 tokens, {folder / 'model'} one of 64")
    other = write_model(folder / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    text = reference_message(folder, path=str(other))
    assert text.startswith(
        f"reference.path: {other} has another tokenizer than {folder / 'model'}: 'A' is the token 34"
    )
    (other / "tokenizer.json").write_text("{")
    assert reference_message(folder, path=str(other)).startswith("reference.path: ")
