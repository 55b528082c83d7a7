"""How long conversions take, beside a plain copy of the same bytes and beside mbridge.

    python -m benchmarks.conversion [--model models/SmolLM2-135M] [--rounds 3] [--folder runs/conversion]

Two models: the given one in fp32, and a made-up Llama with 1.0 billion parameters in bf16. In each round, in turn:
a plain copy of the Hugging Face folder's weights (read and write in blocks of 8 MiB, then fsync), our conversion to a
Megatron checkpoint (TP 2) and back, and mbridge's (TP 1: into a model in memory, which megatron-core then saves; and
from it back into safetensors). Every result is flushed to the disk before the clock stops; sources lie in the page
cache for all. The table shows seconds (median of the rounds) and ratios to the copy of the same round. Process starts,
and for mbridge the building of the model, are not counted; checksums, which the others do not compute, are.
"""

# ruff: noqa: E402  (what is set first must be set before torch makes a tensor)

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from dapo_megatron.checkpoint import use_large_pages

use_large_pages()  # as the commands do, and for all that is measured here

# isort: split
import torch

import dapo_megatron.trainer  # noqa: F401  (adapts megatron-core before it is imported below)

# isort: split
from megatron.core import dist_checkpointing
from rich.console import Console
from rich.table import Table

from dapo_megatron.checkpoint.convert import hf_to_megatron, megatron_to_hf
from dapo_megatron.checkpoint.hf import HFReader, HFWriter
from dapo_megatron.checkpoint.safetensors_file import Entry
from dapo_megatron.config.training import ParallelConfig, TrainingConfig
from dapo_megatron.files import fsync
from dapo_megatron.models.registry import architecture_of
from dapo_megatron.models.table import hf_shapes
from dapo_megatron.run_state.writer import write_in_process
from dapo_megatron.trainer import parallel
from dapo_megatron.trainer.build import ModelChunk, build_model

BLOCK = 8 << 20
BILLION = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_hidden_layers": 20,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}
COPY = "plain copy"


def make_billion(folder: Path) -> Path:
    """Write the made-up model, once."""
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(BILLION | {"dtype": "bfloat16"}))
        shapes = hf_shapes(architecture_of(folder))
        (folder / "config.json").rename(folder / "config.part")  # a folder without its weights is no model
        writer = HFWriter(folder, [Entry(name, torch.bfloat16, shape) for name, shape in shapes.items()])
        writer.create()
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            writer.write(name, torch.randn(shape, generator=generator).mul_(0.02).bfloat16())
        (folder / "config.part").rename(folder / "config.json")
    return folder


def plain_copy(source: Path, out: Path) -> None:
    """What any program must do that writes as many bytes."""
    out.mkdir()
    for path in source.glob("*.safetensors"):
        with path.open("rb", buffering=0) as read, (out / path.name).open("wb", buffering=0) as write:
            while block := read.read(BLOCK):
                write.write(block)
            os.fsync(write.fileno())


class Mbridge:
    """mbridge with a model in memory, on one rank."""

    def __init__(self, folder: Path) -> None:
        from tests.oracle import bridge

        layout = ParallelConfig()
        parallel.initialize(layout, seed=1)
        dtype = HFReader(folder).dtype("model.norm.weight")
        training = TrainingConfig(precision="fp32" if dtype == torch.float32 else "bf16", layer_backend="local")
        self.model: list[ModelChunk] = list(build_model(architecture_of(folder), layout, training, temperature=1.0))
        self.folder, self._bridge = folder, bridge(folder, dtype)

    @torch.no_grad()
    def to_megatron(self, out: Path) -> None:
        """Into the model, and from there into a distributed checkpoint."""
        self._bridge.load_weights(self.model, str(self.folder))
        out.mkdir()
        dist_checkpointing.save(self.model[0].sharded_state_dict(), str(out))
        flush(out)

    @torch.no_grad()
    def to_hf(self, out: Path) -> None:
        """From the model into safetensors."""
        self._bridge.save_weights(self.model, str(out))
        flush(out)


def flush(folder: Path) -> None:
    """Wait until everything is on the disk."""
    for path in folder.rglob("*"):
        fsync(path)


def measure(model: Path, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of every step in every round."""
    other = Mbridge(model) if importlib.util.find_spec("mbridge") else None
    seconds: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        os.sync()  # no step pays for the one before
        started = time.monotonic()
        work()
        seconds.setdefault(name, []).append(time.monotonic() - started)

    for _ in range(rounds):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        timed(COPY, lambda: plain_copy(model, folder / "copy"))
        timed("to Megatron, ours", lambda: hf_to_megatron(model, folder / "megatron", ParallelConfig(tensor=2)))
        timed("to Hugging Face, ours", lambda: megatron_to_hf(folder / "megatron", folder / "hf"))
        if other is not None:
            timed("to Megatron, mbridge", lambda: other.to_megatron(folder / "other"))
            timed("to Hugging Face, mbridge", lambda: other.to_hf(folder / "other_hf"))
    shutil.rmtree(folder)
    return seconds


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Times of conversions, as ratios to a plain copy.")
    parser.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M"), help="Hugging Face folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("runs/conversion"), help="where results go; needs 10 GB")
    options = parser.parse_args()
    write_in_process()
    table = Table("model", "step", "seconds", "/ plain copy", "all rounds")
    for model in (options.model, make_billion(options.folder.with_name(options.folder.name + "-1B"))):
        size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
        seconds = measure(model, options.folder, options.rounds)
        for step, values in seconds.items():
            ratios = [value / copy for value, copy in zip(values, seconds[COPY], strict=True)]
            cells = [f"{statistics.median(x):.2f}" for x in (values, ratios)]
            table.add_row(f"{model.name}, {size / 1e9:.2f} GB", step, *cells, " ".join(f"{r:.2f}" for r in ratios))
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
