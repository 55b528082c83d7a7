"""The commands about checkpoints: convert, export, reshard, inspect, compare-weights. Loads torch when one runs."""

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dapo_megatron.checkpoint import use_large_pages
from dapo_megatron.errors import UserError, renamed_keys

if TYPE_CHECKING:
    from dapo_megatron.checkpoint.convert import Done
    from dapo_megatron.config.training import ParallelConfig
    from dapo_megatron.models.architecture import Architecture

# Options of a layout, and the keys of a run's configuration that rules and messages are written in.
_LAYOUT = {
    "tp": "parallel.tensor",
    "pp": "parallel.pipeline",
    "vpp": "parallel.virtual_pipeline",
    "ep": "parallel.expert",
    "etp": "parallel.expert_tensor",
}
_MEANING = {
    "tp": "tensor-parallel size",
    "pp": "pipeline stages",
    "vpp": "model chunks on each stage",
    "ep": "expert-parallel size",
    "etp": "tensor-parallel size within an expert",
}
_DTYPES = ("float32", "bfloat16", "float16")


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add them to the command line."""
    _add_convert(commands)
    _add_export(commands)
    _add_reshard(commands)
    inspect = commands.add_parser(
        "inspect",
        help="what a checkpoint holds",
        description="Print format, model, layout, step and tensors of a Hugging Face folder, a Megatron checkpoint or "
        "the newest state of a run.",
    )
    inspect.add_argument("folder", type=Path, metavar="DIR")
    inspect.set_defaults(command=_inspect)
    compare = commands.add_parser(
        "compare-weights",
        help="compare two checkpoints tensor by tensor",
        description="Compare the weights of two checkpoints of any formats and layouts (of a run's folder, its newest "
        "state) by name, value and SHA-256. "
        "Exit code 0: equal byte by byte, 1: not, 2: one cannot be read.",
    )
    compare.add_argument("a", type=Path, metavar="A")
    compare.add_argument("b", type=Path, metavar="B")
    compare.set_defaults(command=_compare)


def new_folder(text: str) -> Path:
    """A folder that a command is to make, for argparse. Raises ArgumentTypeError where the path ends in no name."""
    path = Path(text)
    if path.name in ("", ".."):
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a new folder")
    return path


def any_checkpoint(folder: Path) -> Path:
    """The checkpoint that a user means by a folder: the newest state where it is a run's, else itself.

    Raises:
        UserError: if it is the folder of a run without a state.
    """
    from dapo_megatron.checkpoint import is_megatron
    from dapo_megatron.checkpoint.reshard import find_checkpoint

    return find_checkpoint(folder) if is_megatron(folder) or (folder / "state").is_dir() else folder


def _add_convert(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    convert = commands.add_parser(
        "convert",
        help="Hugging Face to Megatron",
        description="Write a Hugging Face folder as a Megatron checkpoint whose files are the shards of a layout. It "
        "loads in every layout; in this one each rank reads files of its own. Under torchrun the processes share the "
        "work. An interrupted conversion goes on when it is started again.",
    )
    convert.add_argument("--hf", type=Path, required=True, metavar="DIR", help="Hugging Face folder")
    _add_out(convert, "the new checkpoint")
    _add_layout(convert)
    _add_dtype(convert)
    convert.set_defaults(command=_convert)


def _add_export(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    export = commands.add_parser(
        "export",
        help="Megatron to Hugging Face",
        description="Write a Megatron checkpoint, or the newest state of a run, as a Hugging Face folder. An "
        "interrupted export goes on when it is started again.",
    )
    _add_checkpoint(export)
    _add_out(export, "the new Hugging Face folder")
    _add_dtype(export)
    export.add_argument(
        "--base",
        type=Path,
        metavar="DIR",
        help="checkpoint with the tensors that training leaves as they are, such as multi-token prediction (default: "
        "the run's model.path)",
    )
    export.add_argument(
        "--max-shard-gb", type=float, default=4.0, metavar="N", help="largest safetensors file (default 4, in GiB)"
    )
    export.set_defaults(command=_export)


def _add_reshard(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    reshard = commands.add_parser(
        "reshard",
        help="Megatron to Megatron in another layout",
        description="Write a Megatron checkpoint, or the newest state of a run with its optimizer, as the shards of "
        "another layout. OUT is then a checkpoint, or the folder of a run that continues with run.dir=OUT.",
    )
    _add_checkpoint(reshard)
    _add_out(reshard, "the new checkpoint, or run folder")
    _add_layout(reshard)
    reshard.add_argument("--weights-only", action="store_true", help="leave the optimizer's state and the run behind")
    reshard.set_defaults(command=_reshard)


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="DIR",
        help="Megatron checkpoint, a run's saved state, or the folder of a run (its newest state)",
    )


def _add_out(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--out", type=new_folder, required=True, metavar="DIR", help=f"{what}; must not exist yet")
    parser.add_argument(
        "--verify", action="store_true", help="read the result again and compare every tensor with the manifest"
    )


def _add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=_DTYPES, help="of the weights written (default: as they are)")


def _add_layout(parser: argparse.ArgumentParser) -> None:
    layout = parser.add_argument_group("layout (sizes; default 1)")
    for option, meaning in _MEANING.items():
        layout.add_argument(f"--{option}", type=int, default=1, metavar="N", help=meaning)
    layout.add_argument(
        "--pp-layers", metavar="N,N,...", help="layers of each model chunk, for stages that are not alike"
    )


def _parallel(options: argparse.Namespace, arch: "Architecture", model: str) -> "ParallelConfig":
    """The layout that the options describe, checked against the model."""
    from dapo_megatron.config.training import ParallelConfig
    from dapo_megatron.models.layout import check_layout

    sizes = {key.partition(".")[2]: getattr(options, option) for option, key in _LAYOUT.items()}
    for option, size in zip(_LAYOUT, sizes.values(), strict=True):
        if size < 1:
            raise UserError(f"--{option} {size}: must be at least 1")
    layers = _numbers(options.pp_layers) if options.pp_layers else None
    # Experts with tensor parallelism are trained with sequence parallelism alone; weights lie the same way.
    parallel = ParallelConfig(**sizes, sequence=options.tp > 1, pipeline_layers=layers)
    names = {"parallel.expert_tensor": "--etp", "parallel.pipeline_layers": "--pp-layers"}
    names |= {key: f"--{option}" for option, key in _LAYOUT.items()}
    with renamed_keys(names):
        check_layout(arch, parallel, model)
    return parallel


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--pp-layers {text}: must be numbers with commas between them, such as 4,3,3") from None


def _convert(options: argparse.Namespace) -> int:
    use_large_pages()
    import torch

    from dapo_megatron.checkpoint.convert import hf_to_megatron
    from dapo_megatron.models.registry import architecture_of

    with renamed_keys({"model.path": "--hf"}):
        parallel = _parallel(options, architecture_of(options.hf), options.hf.resolve().name)
        dtype = getattr(torch, options.dtype) if options.dtype else None
        return _finish(options, lambda: hf_to_megatron(options.hf, options.out, parallel, dtype=dtype))


def _export(options: argparse.Namespace) -> int:
    use_large_pages()
    import torch

    from dapo_megatron.checkpoint.convert import megatron_to_hf
    from dapo_megatron.checkpoint.reshard import find_checkpoint

    if not 0 < options.max_shard_gb < math.inf:
        raise UserError(f"--max-shard-gb {options.max_shard_gb}: must be more than 0, and a number")
    shard_bytes = int(options.max_shard_gb * (1 << 30))
    dtype = getattr(torch, options.dtype) if options.dtype else None
    with renamed_keys({"model.path": "--checkpoint"}):
        checkpoint = find_checkpoint(options.checkpoint)
        return _finish(
            options,
            lambda: megatron_to_hf(checkpoint, options.out, dtype=dtype, base=options.base, shard_bytes=shard_bytes),
        )


def _reshard(options: argparse.Namespace) -> int:
    use_large_pages()
    from dapo_megatron.checkpoint.reshard import find_checkpoint, reshard
    from dapo_megatron.models.registry import architecture_of

    with renamed_keys({"model.path": "--checkpoint"}):
        checkpoint = find_checkpoint(options.checkpoint)
        parallel = _parallel(options, architecture_of(checkpoint), options.checkpoint.resolve().name)
        return _finish(options, lambda: reshard(checkpoint, options.out, parallel, weights_only=options.weights_only))


def _finish(options: argparse.Namespace, convert: "Callable[[], Done]") -> int:
    """Convert, verify where asked, and say what was done, on the first process."""
    import os

    from dapo_megatron.checkpoint.compare import verify_folder

    started = time.monotonic()
    done = convert()
    seconds = time.monotonic() - started
    if int(os.environ.get("RANK", 0)):
        return 0
    print(f"{done.folder}: {len(done.manifest.tensors)} tensors, {done.num_bytes / 1e9:.3f} GB in {seconds:.1f} s")
    if options.verify:
        started = time.monotonic()
        count = verify_folder(done.folder)
        print(f"verified: {count} tensors read again, all as in the manifest ({time.monotonic() - started:.1f} s)")
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from rich.console import Console

    from dapo_megatron.checkpoint.inspect import inspect

    with renamed_keys({"model.path": "inspect", "--checkpoint": "inspect"}):
        inspect(any_checkpoint(options.folder), Console())
    return 0


def _compare(options: argparse.Namespace) -> int:
    from rich.console import Console

    from dapo_megatron.checkpoint.compare import compare_weights

    with renamed_keys({"model.path": "compare-weights", "--checkpoint": "compare-weights"}):
        return 0 if compare_weights(any_checkpoint(options.a), any_checkpoint(options.b), Console()) else 1
