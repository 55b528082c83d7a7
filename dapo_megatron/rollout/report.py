"""What a step's groups cost in operations and seconds, and each group's record on disk."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from dapo_megatron.files import write_atomically
from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.flops import generation_flops
from dapo_megatron.rollout.statistics import Draw
from dapo_megatron.types import Prompt

MAX_PROMPT_CHARACTERS = 2000
PATTERN = "groups_*.jsonl"


def cost_stats(draws: Sequence[Draw], arch: Architecture, seconds: float) -> dict[str, float]:
    """Metrics of what sampling cost.

    Args:
        draws: all draws of a step.
        arch: the model that was sampled from.
        seconds: what the step's sampling took.

    Returns:
        `flops/generated` and `flops/kept`: operations for the answers that the step finished, and for those of them
        that are trained on. `seconds_dropped`: the seconds, shared out by tokens, that went into the others.
    """
    kept = [draw for draw in draws if draw.outcome == "kept"]
    generated = sum(draw.tokens for draw in draws)
    kept_share = sum(draw.tokens for draw in kept) / generated if generated else 0.0
    return {
        "flops/generated": _flops(draws, arch),
        "flops/kept": _flops(kept, arch),
        "seconds_dropped": seconds * (1.0 - kept_share),
    }


def _flops(draws: Sequence[Draw], arch: Architecture) -> float:
    prompts = [len(draw.prompt.token_ids) for draw in draws for _ in draw.new_answers]
    responses = [len(sample.token_ids) for draw in draws for sample in draw.new_answers]
    return generation_flops(arch, np.array(prompts, dtype=np.int64), np.array(responses, dtype=np.int64))


class GroupReport:
    """A file of lines a step in `folder`, groups_000001.jsonl and so on: each group that counts, kept or dropped.

    `decode` makes text of a prompt's token ids.
    """

    def __init__(self, folder: str | Path, decode: Callable[[Sequence[int]], str]):
        self.folder = Path(folder)
        self._decode = decode

    def write(self, step: int, draws: Sequence[Draw]) -> None:
        """Record a step. A crash at any point leaves the whole file or none; an earlier record is replaced."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = (
            orjson.dumps(self._record(step, draw), option=orjson.OPT_APPEND_NEWLINE)
            for draw in draws
            if draw.outcome not in ("surplus", "aborted")
        )
        write_atomically(self.folder / f"groups_{step:06d}.jsonl", b"".join(lines))

    def _record(self, step: int, draw: Draw) -> dict[str, Any]:
        """`right`, `truncated` and the counts in `reasons` are of the `answers` that finished, `tokens` is theirs."""
        return {
            "step": step,
            "draw": draw.number,
            "prompt_id": draw.prompt.id,
            "data_source": draw.prompt.data_source,
            "verdict": draw.outcome,
            "ground_truth": draw.prompt.ground_truth,
            "prompt": self._text(draw.prompt),
            "right": sum(sample.correct for sample in draw.answers),
            "answers": len(draw.answers),
            "tokens": sum(len(sample.token_ids) for sample in draw.answers),
            "truncated": sum(sample.finish_reason == "length" for sample in draw.answers),
            "reasons": dict(Counter(sample.reason for sample in draw.answers)),
        }

    def _text(self, prompt: Prompt) -> str:
        text = self._decode(prompt.token_ids[:MAX_PROMPT_CHARACTERS])  # a token is a character or more, as a rule
        return text[:MAX_PROMPT_CHARACTERS]


def read_groups(folder: str | Path) -> Iterator[dict[str, Any]]:
    """All records in `folder`, in the order of the draws.

    Raises:
        ValueError: when a file is not what `GroupReport` writes, naming file and line.
    """
    for path in sorted(Path(folder).glob(PATTERN)):
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            try:
                yield orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON: {error}") from error
