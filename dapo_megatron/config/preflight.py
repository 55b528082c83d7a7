"""Checks made before any process starts, without torch. What they find, a run would only find minutes later.

Every check raises `UserError` with the key, what is wrong and the rule.
"""

import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dapo_megatron.checkpoint import INDEX, MEGATRON_FILES, SINGLE, is_megatron
from dapo_megatron.config.critic_view import critic_config, critic_keys
from dapo_megatron.config.fleet import FleetConfig, server_urls
from dapo_megatron.config.precision_rules import check_precision
from dapo_megatron.config.reference_view import reference_config, reference_keys
from dapo_megatron.config.run import Config
from dapo_megatron.data.preferences import load_pairs, tokenize_pairs
from dapo_megatron.data.prompts import load_rows, tokenize
from dapo_megatron.data.tokenizer import Tokenizer
from dapo_megatron.errors import UserError, renamed_keys
from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.layout import check_layout, check_ranks
from dapo_megatron.models.registry import architecture_of
from dapo_megatron.rewards.function import check_function
from dapo_megatron.rollout.address import controller_host
from dapo_megatron.rollout.checks import UnreachableError, check_server
from dapo_megatron.rollout.server import check_gpu_servers, check_vllm
from dapo_megatron.run_state.store import latest_state, read_run, same_layout
from dapo_megatron.serve import read_token
from dapo_megatron.sync.proof import proved_plan

SAMPLE = 256  # prompts encoded to find one that fits, before all are
TOKENIZER = "tokenizer.json"
TOKENIZER_FILES = (TOKENIZER, "tokenizer_config.json")


def preflight(config: Config, num_ranks: int) -> None:
    """Check everything about a run of `num_ranks` trainer ranks that can be known without starting a process.

    Raises:
        UserError: for the first check that fails.
    """
    if config.fleet.mode == "colocated" and int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)) != num_ranks:
        raise UserError("fleet.mode=colocated runs on one node: servers of other nodes' GPUs are not started yet")
    architecture = check_model(Path(config.model.path))
    check_plan(config, num_ranks, architecture)
    check_reference(config, num_ranks, architecture)
    check_critic(config, num_ranks, architecture)
    check_machine(config, num_ranks)


def check_plan(config: Config, num_ranks: int, architecture: Architecture) -> None:
    """What follows from the configuration and the model's dimensions alone, on any machine."""
    _check_trainer(config, num_ranks, architecture)
    if config.has_servers:
        proved_plan(config, architecture, num_ranks)
        check_colocated(config, num_ranks)
    if (replayed := config.training.router_replay) != "off" and not architecture.num_experts:
        raise UserError(f"training.router_replay={replayed}: {config.model.path} has no experts; use off")


def check_reference(config: Config, num_ranks: int, policy: Architecture) -> None:
    """The frozen reference policy, where the objective has one: its model, and what `check_plan` asks of the trainer.

    Args:
        config: the run's configuration.
        num_ranks: number of trainer ranks.
        policy: the architecture of the policy, whose tokens the reference reads.
    """
    if config.algorithm.has_reference:
        with renamed_keys(reference_keys(config)):
            architecture = _check_beside(config, reference_config(config), num_ranks, policy)
        _check_tokens("reference", config, config.reference.path, architecture, policy)


def check_critic(config: Config, num_ranks: int, policy: Architecture) -> None:
    """The critic, where the objective has one. Arguments as in `check_reference`."""
    if config.algorithm.has_critic:
        with renamed_keys(critic_keys(config)):
            architecture = _check_beside(config, critic_config(config), num_ranks, policy)
        _check_tokens("critic", config, config.critic.path, architecture, policy)


def _check_beside(config: Config, own: Config, num_ranks: int, policy: Architecture) -> Architecture:
    """The architecture of a model beside the policy, which `own` configures: complete, and fit for its layout."""
    same = own.model.path == config.model.path
    architecture = policy if same else check_weights(Path(own.model.path))
    _check_trainer(own, num_ranks, architecture)
    return architecture


def _check_tokens(
    section: str, config: Config, path: str | None, architecture: Architecture, policy: Architecture
) -> None:
    """A model beside the policy, with a folder of its own, reads the same tokens."""
    if architecture.vocab_size != policy.vocab_size:
        raise UserError(
            f"{section}.path: {path} has a vocabulary of {architecture.vocab_size} tokens, {config.model.path} one "
            f"of {policy.vocab_size}: the {section} must have the policy's"
        )
    folders = {Path(path or config.model.path), Path(config.model.path)}
    if path is None or len(folders) == 1 or not all((folder / TOKENIZER).is_file() for folder in folders):
        return
    with renamed_keys({"model.path": f"{section}.path"}):
        ours = Tokenizer(path).vocabulary()
    if ours != (theirs := Tokenizer(config.model.path).vocabulary()):
        token = min(text for text, _ in ours.items() ^ theirs.items())
        raise UserError(
            f"{section}.path: {path} has another tokenizer than {config.model.path}: {token!r} is the token "
            f"{ours.get(token)} of the one and {theirs.get(token)} of the other"
        )


def _check_trainer(config: Config, num_ranks: int, architecture: Architecture) -> None:
    """Sequences, layout, ranks and precision fit the model."""
    name = Path(config.model.path).name
    check_lengths(config, architecture)
    check_layout(architecture, config.parallel, name)
    check_ranks(config.parallel, num_ranks, "--nproc")
    check_precision(architecture, config.training, config.optimizer, config.parallel, model=name)


def check_machine(config: Config, num_ranks: int) -> None:
    """What this machine must have: a run folder, trackers, data, and servers, a recording or given pairs."""
    check_run_dir(config, num_ranks)
    check_tracking(config)
    check_te(config)
    if config.rollout.replay is not None:
        check_replay(Path(config.rollout.replay))
        return
    if not config.has_servers:
        check_pairs(config)
        return
    if config.fleet.mode != "external":
        check_fleet(config.fleet)
        check_fp8(config)
        if config.training.router_replay == "R3":
            why = "training.router_replay=R3 needs servers on GPUs: vLLM returns no routes on a CPU; use R2 or off"
            check_gpu_servers(config.fleet.python, why)
    if config.fleet.mode == "external":
        check_external(config)
    check_host(config.fleet)
    if config.data.reward_function is not None:
        check_function(config.data.reward_function)
    check_data(config)


def check_model(folder: Path) -> Architecture:
    """The architecture of a complete checkpoint folder: supported, with tokenizer, and no shard missing or cut off."""
    architecture = check_weights(folder)
    for name in TOKENIZER_FILES:
        if not (folder / name).is_file():
            raise UserError(f"model.path: {folder} has no {name}")
    return architecture


def check_weights(folder: Path) -> Architecture:
    """The architecture of a checkpoint folder: supported, and no shard missing or cut off."""
    if not folder.is_dir():
        raise UserError(f"model.path: the folder {folder} does not exist")
    architecture = architecture_of(folder)
    if is_megatron(folder):
        _check_megatron(folder)
        return architecture
    for shard, names in _shards(folder).items():
        _check_shard(shard, names)
    return architecture


def _check_megatron(folder: Path) -> None:
    """Reading `.metadata`, which says what is in which file, takes torch: the trainer does."""
    for name in MEGATRON_FILES:
        if not (folder / name).is_file():
            raise UserError(f"model.path: {folder} has no {name}: it is no complete Megatron checkpoint")
    if not any(folder.glob("*.distcp")):
        raise UserError(f"model.path: {folder} has no *.distcp: it is no complete Megatron checkpoint")


def _shards(folder: Path) -> dict[Path, set[str] | None]:
    """Each safetensors file with the tensors that the index promises in it (None: there is no index)."""
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).exists():
            raise UserError(
                f"model.path: {folder} has neither {SINGLE} nor {INDEX}, nor is it a Megatron checkpoint (*.distcp)"
            )
        return {folder / SINGLE: None}
    try:
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        shards: dict[Path, set[str] | None] = {folder / file: set() for file in sorted(set(weight_map.values()))}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"model.path: {index} is not an index with a `weight_map` of tensor names to files") from None
    return {shard: {name for name, file in weight_map.items() if file == shard.name} for shard in shards}


def _check_shard(shard: Path, names: set[str] | None) -> None:
    """A safetensors file is 8 bytes of header length, a JSON header with byte ranges, and the bytes."""
    try:
        size = shard.stat().st_size
        with shard.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(min(header_bytes, size)))
        header.pop("__metadata__", None)
        promised = 8 + header_bytes + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except FileNotFoundError:
        raise UserError(f"model.path: {shard} is missing, but {INDEX} names it") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"model.path: {shard} is not a complete safetensors file: its header cannot be read") from None
    if size != promised:
        raise UserError(f"model.path: {shard} is cut off or damaged: {size} bytes, its header promises {promised}")
    missing = sorted((names or set()) - header.keys())
    if missing:
        raise UserError(f"model.path: {shard} lacks the tensor {missing[0]}, which {INDEX} places there")


def check_lengths(config: Config, architecture: Architecture) -> None:
    """Prompt and answer fit the positions the model was made for."""
    longest = config.longest_sequence
    if longest > architecture.max_positions:
        raise UserError(
            f"{config.longest_sequence_keys} = {longest} is more than the "
            f"{architecture.max_positions} positions of {config.model.path}"
        )


def check_fleet(fleet: FleetConfig) -> None:
    """vLLM is installed, and the ports of servers that the run starts are free."""
    if fleet.python is not None:
        check_vllm(fleet.python)
    elif find_spec("vllm") is None:
        raise UserError("vLLM is not installed: run `make setup` (CPU) or `pip install vllm==0.32.0` (GPU)")
    if fleet.port is None:
        return
    for port in range(fleet.port, fleet.port + fleet.servers):
        if port > 65535 or not _is_free(fleet.host, port):
            raise UserError(f"fleet.port={fleet.port}: port {port} on {fleet.host} is in use or cannot be bound")


def check_colocated(config: Config, num_ranks: int) -> None:
    """Servers on the trainers' GPUs have one for each worker."""
    fleet = config.fleet
    if fleet.mode == "colocated" and num_ranks % fleet.world_size:
        raise UserError(
            f"fleet.mode=colocated: servers of fleet.tensor={fleet.tensor} x fleet.pipeline={fleet.pipeline} GPUs do "
            f"not fill the GPUs of {num_ranks} trainer ranks"
        )


def check_fp8(config: Config) -> None:
    """The servers that the run starts have kernels for the format in which they get their weights."""
    if config.fleet.weight_format == "fp8_block":
        why = "fleet.weight_format=fp8_block needs servers on GPUs: vLLM has no such kernels for a CPU"
        check_gpu_servers(config.fleet.python, why)


def check_external(config: Config) -> None:
    """There are servers, and each answers, opens with the token alone and fits the run."""
    fleet = config.fleet
    token, urls = read_token(None, fleet.token_env), server_urls(fleet)
    if not urls:
        raise UserError(f"{fleet.source}: {fleet.urls_file} names no server: start one with launch/rollout_fleet.sh")

    def check(url: str) -> None:
        try:
            check_server(url, token, fleet, config.longest_sequence, fleet.source)
        except UnreachableError as error:
            raise UserError(str(error)) from None

    with ThreadPoolExecutor() as pool:
        list(pool.map(check, urls))


def check_host(fleet: FleetConfig) -> None:
    """Servers and trainer ranks on other nodes can reach rank 0, where they meet for a push, at `fleet.host`."""
    if not _is_loopback(fleet.host):
        return
    away = [url for url in server_urls(fleet) if not _is_loopback(urlsplit(url).hostname or "")]
    if away or not _is_loopback(controller_host(os.environ)):
        raise UserError(
            f"fleet.host={fleet.host}: weights are sent from this address of the node of rank 0, and "
            f"{f'the server {away[0]}' if away else 'trainer ranks of other nodes'} cannot reach it: give a private "
            "address of that node"
        )


def check_data(config: Config) -> None:
    """Training and held-out rows can be read, have a gold answer, and at least one prompt of each is short enough."""
    tokenizer = Tokenizer(config.model.path)
    for dataset in filter(None, (config.data.train, config.evaluation.data)):
        rows = load_rows(dataset)
        sample = [row.prompt for row in rows.rows[:SAMPLE]]
        longest = config.data.max_prompt_tokens
        if not any(len(ids) <= longest for ids in tokenizer.encode_prompts(sample)):
            tokenize(rows, tokenizer, longest)  # refuses when all are too long


def check_pairs(config: Config) -> None:
    """Rows of the given pairs can be read and have what they need, and at least one pair can be trained on."""
    tokenizer, stop = Tokenizer(config.model.path), config.rollout.stop
    rows = load_pairs(config.data.train, stop)
    limits = {"max_prompt_tokens": config.data.max_prompt_tokens, "max_answer_tokens": config.rollout.max_tokens}
    try:
        tokenize_pairs(replace(rows, rows=rows.rows[:SAMPLE]), tokenizer, stop, **limits)
    except UserError:
        tokenize_pairs(rows, tokenizer, stop, **limits)  # refuses when none can be


def check_run_dir(config: Config, num_ranks: int) -> None:
    """The run folder can be written, and a state saved in it may be continued from at this layout."""
    folder = Path(config.run.dir)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"run.dir: {existing} is not a folder that can be written")
    state = latest_state(folder)
    if state is None:
        return
    if config.run.resume == "never":
        raise UserError(f"run.resume=never, but {state} holds a saved state: choose another run.dir or remove it")
    same_layout(state, read_run(state, "layout", "step"), config.parallel.layout(num_ranks))


def check_te(config: Config) -> None:
    """Transformer Engine is installed where it is asked for, by name or by FP8."""
    training = config.training
    asked = "precision=fp8" if training.precision == "fp8" else f"layer_backend={training.layer_backend}"
    if asked in ("precision=fp8", "layer_backend=te") and find_spec("transformer_engine") is None:
        raise UserError(
            f"training.{asked} needs Transformer Engine, which is not installed: run `pip install "
            "'transformer-engine[pytorch]'` on a machine with CUDA, or use NVIDIA's PyTorch image"
        )


def check_replay(folder: Path) -> None:
    """The folder to replay holds recorded batches."""
    if not any(folder.glob("step_*.npz")):
        raise UserError(f"rollout.replay: {folder} holds no recorded batches (step_*.npz)")


def check_tracking(config: Config) -> None:
    """Weights & Biases is installed where it is configured."""
    if config.tracking.wandb_project is not None and find_spec("wandb") is None:
        raise UserError("tracking.wandb_project is set, but wandb is not installed: run `pip install wandb`")


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
