"""Loading a config: overrides, nearest keys, one clear sentence for each fault."""

import subprocess
import sys
from pathlib import Path

import pytest
from config_helpers import write_config

from dapo_megatron.config.load import load_config
from dapo_megatron.config.reference import config_keys, markdown
from dapo_megatron.errors import UserError

ROOT = Path(__file__).parents[2]


def message(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_values_defaults_and_overrides(tmp_path: Path) -> None:
    overrides = ["optimizer.lr=1e-5", 'rollout.stop=["\\n", "."]', "fleet.port=null", "data.train.limit=7"]
    config = load_config(write_config(tmp_path), overrides)
    assert config.rollout.samples_per_prompt == 4
    assert config.optimizer.lr == 1e-5
    assert config.rollout.stop == ["\n", "."]
    assert config.fleet.port is None
    assert config.data.train.limit == 7
    assert config.algorithm.clip.high == 0.28
    assert config.responses_per_step == 16


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("rollout.sample_per_prompt=3", "rollout.samples_per_prompt"),
        ("rolout.max_tokens=3", "rollout"),
        ("lr=1", "optimizer.lr"),
        ("training.lr=1", "optimizer.lr"),
        ("parallel.tensor_parallel=2", "parallel.tensor"),
        ("algorithm.clip.hihg=0.3", "algorithm.clip.high"),
        ("evaluation.data.arithmetic.problem=3", "evaluation.data.arithmetic.problems"),
    ],
)
def test_unknown_key_names_the_nearest(tmp_path: Path, override: str, nearest: str) -> None:
    key = override.partition("=")[0]
    text = message(write_config(tmp_path), override)
    assert "unknown key" in text
    assert f"did you mean {nearest}" in text
    assert key.split(".")[0] in text


def test_unknown_key_in_the_file_names_the_file(tmp_path: Path) -> None:
    path = write_config(tmp_path, optimizer={"learning_rate": 1})
    assert message(path).startswith(f"{path}: unknown key optimizer.learning_rate; did you mean ")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "rollout.samples_per_prompt=1",
            "rollout.samples_per_prompt=1 is not allowed, it must be greater than or equal to 2",
        ),
        ("run.steps=many", "run.steps='many' is not allowed, it must be a valid integer"),
        ("fleet.dtype=int8", "fleet.dtype='int8' is not allowed, it must be 'float32', 'bfloat16' or 'float16'"),
        ("rollout=5", "rollout must be a section of keys, not 5"),
        ("rollout.top_p=0.9", "top_p must be 1 for training"),
        ("training.mini_batch=6", "training.mini_batch (6) must be a multiple of rollout.samples_per_prompt (4)"),
        ("training.mini_batch=12", "(16) must be a multiple of training.mini_batch (12)"),
        ("training.micro_batch_tokens=100", "data.max_prompt_tokens + rollout.max_tokens = 136"),
        (
            "algorithm.overlong.cache_tokens=9",
            "algorithm.overlong.cache_tokens (9) must not exceed rollout.max_tokens (8)",
        ),
        ("rollout.max_prompts_per_step=3", "max_prompts_per_step (3) must be at least prompts_per_step (4)"),
        ("data.train.path=rows.jsonl", "data.train: give exactly one of `path` and `arithmetic`"),
        ("run.steps", "the override 'run.steps' must have the form KEY=VALUE"),
        ("=3", "the override '=3' must have the form KEY=VALUE"),
        ("rollout.stop=[a", "the override 'rollout.stop=[a' cannot be applied"),
    ],
)
def test_each_rule_has_one_sentence(tmp_path: Path, override: str, expected: str) -> None:
    text = message(write_config(tmp_path), override)
    assert expected in text
    assert "\n" not in text


def test_every_fault_is_told_at_once(tmp_path: Path) -> None:
    assert len(message(write_config(tmp_path), "run.steps=0", "optimizer.lr=0").splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run: {steps: 3", "is not valid YAML"),
        ("[1, 2]", "must hold sections"),
        ('run: {steps: 3, dir: "${nowhere}"}', "nowhere"),
        ("run: {steps: 3}", "the key run.dir is required"),
        ("run: 3", "run must be a section of keys, not 3"),
    ],
)
def test_bad_file(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert str(path) in message(path)
    assert expected in message(path)


def test_missing_file(tmp_path: Path) -> None:
    assert (
        message(tmp_path / "no.yaml")
        == f"{tmp_path / 'no.yaml'}: the config file cannot be read: No such file or directory"
    )


def test_reference_page_is_up_to_date() -> None:
    assert (ROOT / "docs/configuration.md").read_text() == markdown(), "run `make docs`"


def test_every_key_is_documented() -> None:
    keys = list(config_keys())
    assert len(keys) > 60
    assert [key.name for key in keys if not key.description] == []
    assert {key.name for key in keys if key.default is None} == {"run.dir", "run.steps", "model.path"}


def test_command_line_and_monitor_load_no_torch() -> None:
    modules = "dapo_megatron.cli, dapo_megatron.config.preflight, dapo_megatron.monitoring.monitor"
    script = f"import sys, {modules}; print(sorted(sys.modules.keys() & {{'torch', 'vllm', 'megatron', 'scipy'}}))"
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "[]"
