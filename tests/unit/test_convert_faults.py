"""Conversions that go wrong: a clear error, the source as it was, and nothing that loads as if it were whole."""

import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import dapo_megatron.trainer  # noqa: F401  (adapts megatron-core before it is imported below)

# isort: split
import torch
from torch import Tensor

from dapo_megatron import cli
from dapo_megatron.checkpoint import convert, hf, journal, reshard
from dapo_megatron.checkpoint.compare import verify_folder
from dapo_megatron.checkpoint.distcp import DistReader
from dapo_megatron.checkpoint.journal import Workspace
from dapo_megatron.checkpoint.manifest import Manifest
from dapo_megatron.checkpoint.megatron import MegatronReader
from dapo_megatron.checkpoint.source import HFSource, Item, MegatronSource
from dapo_megatron.checkpoint.weights import open_weights
from dapo_megatron.errors import UserError
from tests.checkpoints import files_of, load_tensors, random_checkpoint, save_tensors
from tests.models import REPOSITORY

PROJECTION = "model.layers.1.self_attn.o_proj.weight"
COMMANDS = ("convert", "export", "reshard")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder that each command reads. Not to be changed."""
    folder = tmp_path_factory.mktemp("sources")
    hf = random_checkpoint(folder / "hf", "qwen2", tied=True)
    assert cli.main(["convert", "--hf", str(hf), "--out", str(folder / "megatron"), "--tp", "2"]) == 0
    return {"convert": hf, "export": folder / "megatron", "reshard": folder / "megatron"}


def arguments(command: str, source: Path, out: Path) -> list[str]:
    option = "--hf" if command == "convert" else "--checkpoint"
    layout = [] if command == "export" else ["--tp", "2", "--pp", "2"]
    return [command, option, str(source), "--out", str(out), *layout]


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must refuse: its message. The source stays as it is, and there is no result."""

    def run(command: str, source: Path) -> str:
        before = files_of(source)
        assert cli.main(arguments(command, source, tmp_path / "out")) == cli.USER_ERROR
        captured = capsys.readouterr()
        assert captured.err.startswith("dapo-megatron: ")
        assert captured.err.count("\n") == 1
        assert captured.out == ""
        assert files_of(source) == before
        assert not (tmp_path / "out").exists()
        return captured.err

    return run


def drop_file(hf: Path) -> None:
    (hf / "model-00002-of-00002.safetensors").unlink()


def truncate(hf: Path) -> None:
    path = hf / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def change(**changes: Any) -> Callable[[Path], None]:
    """Replace config.json's values."""

    def damage(hf: Path) -> None:
        config = json.loads((hf / "config.json").read_text())
        (hf / "config.json").write_text(json.dumps(config | changes))

    return damage


def put(name: str, make: Callable[[Tensor], Tensor | None], of: str = PROJECTION) -> Callable[[Path], None]:
    """Put what is made of the tensor `of` under a name, or drop that."""

    def damage(hf: Path) -> None:
        tensors = load_tensors(hf)
        made = make(tensors[of])
        tensors.pop(name, None)
        save_tensors(hf, tensors if made is None else tensors | {name: made})

    return damage


BAD_SOURCES: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing file": (drop_file, r"model-00002-of-00002\.safetensors cannot be read: .*No such file"),
    "truncated file": (truncate, r"model-00002-of-00002\.safetensors cannot be read: .*truncated"),
    "integers": (put(PROJECTION, lambda t: t.to(torch.int8)), f"{PROJECTION} is torch.int8; only float32"),
    "mixed dtypes": (put(PROJECTION, lambda t: t.bfloat16()), rf"{PROJECTION} is torch.bfloat16, but model\.layers\.0"),
    "extra tensor": (put("model.layers.9.x", torch.clone), r"holds model\.layers\.9\.x, which Qwen2ForCausalLM has no"),
    "missing tensor": (put(PROJECTION, lambda _: None), f"has no tensor {PROJECTION}"),
    "wrong shape": (
        put(PROJECTION, lambda t: t[:, :-1].clone()),
        rf"{PROJECTION} has the shape \(32, 31\), but config",
    ),
    "other output layer": (
        put("lm_head.weight", lambda t: t + 1, "model.embed_tokens.weight"),
        r"tie_word_embeddings, but lm_head\.weight differs",
    ),
    "another architecture": (change(architectures=["LlamaForCausalLM"]), r"self_attn\..*bias, which Llama"),
    "unknown architecture": (change(architectures=["FalconForCausalLM"]), r"names the architecture FalconForCausalLM"),
    "more layers": (change(num_hidden_layers=6), r"has no tensor model\.layers\.4\."),
    "no config": (lambda hf: (hf / "config.json").unlink(), r"--hf: .*config\.json does not exist"),
}


@pytest.mark.parametrize("fault", BAD_SOURCES)
def test_bad_source(fault: str, refused: Callable[..., str], tmp_path: Path) -> None:
    hf = random_checkpoint(tmp_path / "hf", "qwen2", tied=True, shards=2)
    damage, message = BAD_SOURCES[fault]
    damage(hf)
    assert_matches(message, refused("convert", hf))
    assert not (tmp_path / "out.incomplete").exists()


def assert_matches(pattern: str, text: str) -> None:
    with pytest.raises(UserError, match=pattern):
        raise UserError(text)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def flip_weight(folder: Path) -> None:
    """A bit of a number in the middle of a chunk."""
    chunk = DistReader(folder).chunks("decoder.layers.mlp.linear_fc2.weight")[0]
    flip(folder / chunk.file, chunk.start + chunk.length // 2)


def cut_file(folder: Path) -> None:
    path = folder / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-9])


BAD_CHECKPOINTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "weight": (flip_weight, r"is damaged: model\.layers\.0\.mlp\.down_proj\.weight is not what its tensors\.json says"),
    "missing file": (lambda folder: (folder / "__1_0.distcp").unlink(), r"__1_0\.distcp is missing"),
    "truncated file": (cut_file, r"__1_0\.distcp is truncated"),
    "index": (lambda folder: (folder / ".metadata").write_bytes(b"x"), r"\.metadata cannot be read"),
    "manifest": (lambda folder: (folder / "tensors.json").write_text("{"), r"tensors\.json is not a manifest"),
    "other shapes": (change(hidden_size=64), r"has the shape .*, but config\.json asks for"),
    "fewer layers": (change(num_hidden_layers=2), r"has the shape \(4, 32\), but config\.json asks for \(2, 32\)"),
    "another model": (change(architectures=["LlamaForCausalLM"]), r"linear_qkv\.bias, which LlamaForCausalLM has no"),
}


@pytest.mark.parametrize("command", ["export", "reshard"])
@pytest.mark.parametrize("fault", BAD_CHECKPOINTS)
def test_bad_checkpoint(
    fault: str, command: str, refused: Callable[..., str], sources: dict[str, Path], tmp_path: Path
) -> None:
    folder = copy(sources["export"], tmp_path / "megatron")
    damage, message = BAD_CHECKPOINTS[fault]
    damage(folder)
    assert_matches(message, refused(command, folder))


def copy(folder: Path, to: Path) -> Path:
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def test_verify_finds_damage(sources: dict[str, Path], tmp_path: Path) -> None:
    """In weights of both forms, and a manifest that says something else."""
    megatron, hf = copy(sources["export"], tmp_path / "megatron"), tmp_path / "hf"
    assert cli.main(arguments("export", megatron, hf)) == 0
    verify_folder(hf)
    flip(hf / "model.safetensors", -5)
    flip_weight(megatron)
    for folder, name in ((hf, "model"), (megatron, r"model\.layers\.0\.mlp\.down_proj\.weight")):
        with pytest.raises(UserError, match=rf"{folder} is not what was written: {name}"):
            verify_folder(folder)
    megatron = copy(sources["export"], tmp_path / "other")
    content = json.loads((megatron / "tensors.json").read_text())
    lost = content["tensors"].pop(PROJECTION)
    for tensors, what in ((content["tensors"], f"has {PROJECTION}"), ({"x": lost}, "lacks x")):
        (megatron / "tensors.json").write_text(json.dumps(content | {"tensors": tensors}))
        with pytest.raises(UserError, match=what):
            verify_folder(megatron)


@pytest.mark.parametrize("command", COMMANDS)
def test_out_that_exists(
    command: str, sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("kept")
    assert cli.main(arguments(command, sources[command], tmp_path / "out")) == cli.USER_ERROR
    assert f"--out: {tmp_path / 'out'} exists already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "precious"]


class StopError(Exception):
    """In place of whatever ends a process."""


def stop_after(monkeypatch: pytest.MonkeyPatch, items: int) -> None:
    """Let a conversion end when it has committed so many items."""
    add, counted = Workspace.add, iter(range(items))

    def adding(self: Workspace, entry: Any, num_bytes: int) -> None:
        add(self, entry, num_bytes)
        if next(counted, None) is None:
            raise StopError

    monkeypatch.setattr(Workspace, "add", adding)
    monkeypatch.setattr(journal, "COMMIT_BYTES", 1)


@contextmanager
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the items that a conversion reads."""
    names: list[str] = []
    with monkeypatch.context() as patch:
        for source in (HFSource, MegatronSource):
            patch.setattr(source, "read", _noting(source.read, names))
        yield names


def _noting(read: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    def noting(self: Any, item: Item) -> Any:
        names.append(item.name)
        return read(self, item)

    return noting


def interrupted(command: str, source: Path, out: Path, items: int = 9) -> Path:
    """What a command leaves that ends after so many items."""
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, items - 1)
        with pytest.raises(StopError):
            cli.main(arguments(command, source, out))
    assert not out.exists()
    return out.with_name("out.incomplete")


def assert_not_loadable(folder: Path) -> None:
    for load in (open_weights, MegatronReader):
        with pytest.raises(UserError):
            load(folder)
    assert not (folder / "config.json").exists()  # without which nothing loads a folder
    assert not (folder / "model.safetensors.index.json").exists()


KILLED = """
import sys, time
from dapo_megatron import cli
from dapo_megatron.checkpoint import journal
journal.COMMIT_BYTES = 1
add = journal.Workspace.add
def slow(self, entry, num_bytes):
    add(self, entry, num_bytes)
    time.sleep(0.1)
journal.Workspace.add = slow
sys.exit(cli.main(sys.argv[1:]))
"""


def test_journal_names_what_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data first, then its lines; nothing counts that was not flushed."""
    seen = []
    workspace = Workspace(tmp_path / "out", {}, lambda: seen.append(len(lines(progress))))
    progress = workspace.folder / "progress-0.jsonl"
    monkeypatch.setattr(journal, "COMMIT_BYTES", 100)
    for i in range(4):
        workspace.add({"item": str(i)}, 60)  # two make a commit
    workspace.add({"item": "4"}, 60)
    workspace.settle()
    assert seen == [1, 3]
    assert len(lines(progress)) == 5
    assert [entry["item"] for entry in workspace.all_entries()] == ["0", "1", "2", "3", "4"]
    assert seen == [1, 3, 5]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("where", ["copies", "manifest", "publish"])
def test_interrupted_late(
    command: str, where: str, sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When all weights are written: the folder has no name until everything else is there."""
    out, source = tmp_path / "out", sources[command]
    places = {
        "copies": ({"convert": convert, "export": hf, "reshard": reshard}[command], "copy_without_weights"),
        "manifest": (Manifest, "write"),
        "publish": (Workspace, "finish"),
    }

    def stop(*_: Any) -> None:
        raise StopError

    with monkeypatch.context() as patch:
        patch.setattr(*places[where], stop)
        with pytest.raises(StopError):
            cli.main(arguments(command, source, out))
    assert not out.exists()
    assert cli.main(arguments(command, source, out)) == 0
    assert cli.main(arguments(command, source, tmp_path / "undisturbed")) == 0
    assert files_of(out) == files_of(tmp_path / "undisturbed")


@pytest.mark.parametrize("command", COMMANDS)
def test_killed_and_started_again(
    command: str, sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out, undisturbed = sources[command], tmp_path / "out", tmp_path / "undisturbed"
    before = files_of(source)
    process = subprocess.Popen([sys.executable, "-c", KILLED, *arguments(command, source, out)], cwd=REPOSITORY)
    progress = tmp_path / "out.incomplete" / "progress-0.jsonl"
    deadline = time.monotonic() + 60
    while (len(lines(progress)) < 6) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    assert not out.exists()
    assert_not_loadable(tmp_path / "out.incomplete")
    done = [json.loads(line)["item"] for line in lines(progress)[1:] if line.endswith("\n")]
    with reads(monkeypatch) as names:
        assert cli.main(arguments(command, source, out)) == 0
    assert cli.main(arguments(command, source, undisturbed)) == 0
    assert files_of(out) == files_of(undisturbed)
    assert len(done) >= 5
    assert not set(done) & set(names)
    assert not list(tmp_path.glob("*.incomplete"))
    assert files_of(source) == before


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True) if path.exists() else []


@pytest.mark.parametrize("command", COMMANDS)
def test_line_of_the_journal_that_was_cut(
    command: str, sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And bytes behind the last chunk that counts. Interrupted twice, the second time behind the cut line."""
    out, source = tmp_path / "out", sources[command]
    beside = interrupted(command, source, out)
    progress = beside / "progress-0.jsonl"
    progress.write_text(progress.read_text()[:-5])
    for path in beside.glob("*.distcp"):
        path.write_bytes(path.read_bytes() + b"half a chunk")
    interrupted(command, source, out, 5)
    with reads(monkeypatch) as names:
        assert cli.main(arguments(command, source, out)) == 0
    assert cli.main(arguments(command, source, tmp_path / "undisturbed")) == 0
    assert files_of(out) == files_of(tmp_path / "undisturbed")
    with reads(monkeypatch) as all_names:
        assert cli.main(arguments(command, source, tmp_path / "counted")) == 0
    assert names == all_names[8 + 5 :]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("what", ["gone", "shorter"])
def test_written_bytes_that_are_lost(
    command: str, what: str, sources: dict[str, Path], tmp_path: Path, refused: Callable[..., str]
) -> None:
    beside = interrupted(command, sources[command], tmp_path / "out")
    written = next(path for path in sorted(beside.iterdir()) if path.suffix in (".distcp", ".safetensors"))
    if what == "gone":
        written.unlink()
    else:
        written.write_bytes(written.read_bytes()[: written.stat().st_size // 2])
    for _ in range(2):
        assert_matches(f"{written} has lost bytes .*: remove {beside}", refused(command, sources[command]))


@pytest.mark.parametrize("other", ["layout", "dtype", "source"])
def test_another_job_starts_over(
    other: str, sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf, out = copy(sources["convert"], tmp_path / "hf"), tmp_path / "out"
    interrupted("convert", hf, out)
    again = arguments("convert", hf, out)
    if other == "layout":
        again += ["--tp", "4"]
    if other == "dtype":
        again += ["--dtype", "bfloat16"]
    if other == "source":
        put(PROJECTION, lambda tensor: tensor + 1)(hf)
    with reads(monkeypatch) as names:
        assert cli.main(again) == 0
    assert len(names) == len(set(names)) == len(HFSource(hf).items())
    again[again.index("--out") + 1] = str(tmp_path / "undisturbed")
    assert cli.main(again) == 0
    assert files_of(out) == files_of(tmp_path / "undisturbed")


@contextmanager
def files_no_larger_than(num_bytes: int) -> Iterator[None]:
    """Beyond that a write fails, as on a full disk."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, unlimited[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


@pytest.mark.parametrize("command", COMMANDS)
def test_file_that_cannot_grow(
    command: str, sources: dict[str, Path], tmp_path: Path, refused: Callable[..., str]
) -> None:
    with files_no_larger_than(20_000):
        assert_matches("cannot be written, disk full", refused(command, sources[command]))
    assert_not_loadable(tmp_path / "out.incomplete")
    assert cli.main(arguments(command, sources[command], tmp_path / "out")) == 0
    verify_folder(tmp_path / "out")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 kB, where this process may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("command", COMMANDS)
def test_full_disk(
    command: str,
    sources: dict[str, Path],
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Refused at once where it is foreseen; else the conversion goes on when there is room again."""
    out, again = small_disk / "out", arguments(command, sources[command], small_disk / "out")
    (small_disk / "other").write_bytes(bytes(300_000))
    assert cli.main(again) == cli.USER_ERROR
    assert f"--out: {out} needs 0.00 GB more, but {small_disk} has 0.00 GB free" in capsys.readouterr().err
    assert [path.name for path in small_disk.iterdir()] == ["other"]
    monkeypatch.setattr(convert, "check_space", lambda *_: None)
    monkeypatch.setattr(journal, "COMMIT_BYTES", 1)
    assert cli.main(again) == cli.USER_ERROR
    assert "disk full: No space left on device" in capsys.readouterr().err
    assert not out.exists()
    assert_not_loadable(small_disk / "out.incomplete")
    (small_disk / "other").unlink()
    assert cli.main(again) == 0
    verify_folder(out)
