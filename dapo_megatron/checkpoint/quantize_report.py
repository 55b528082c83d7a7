"""What a quantisation did: each layer, sizes, and how far the log-probs of held-out prompts moved."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from dapo_megatron.checkpoint.quantize_read import LayerReport
from dapo_megatron.trainer.device import current_device


@dataclass(frozen=True)
class ProbeReport:
    """Log-probs of the tokens of held-out prompts (but their first), quantised model minus original, natural log.

    Attributes:
        prompts, tokens: how many were compared.
        mean_difference, mean_abs_difference, max_abs_difference: of the log-prob of a prompt's next token.
        mean_kl: of KL(original || quantised) over the vocabulary.
        top1_agreement: share of tokens before which both models hold the same next token for the likeliest.
    """

    prompts: int
    tokens: int
    mean_difference: float
    mean_abs_difference: float
    max_abs_difference: float
    mean_kl: float
    top1_agreement: float


@dataclass(frozen=True)
class QuantizeReport:
    """The whole of it, as `report.json` holds it.

    Attributes:
        model, out: folders of the original and the quantised checkpoint.
        format: as it was asked for; `algorithm` is its name in the files.
        modelopt: version of nvidia-modelopt.
        calibration_prompts, calibration_tokens: what scales of inputs were taken from; 0 where that is at run time.
        bytes_before, bytes_after: of all tensors.
        layers: every matrix of the checkpoint.
        probe: the difference it makes.
        seconds: of each stage.
    """

    model: str
    out: str
    format: str
    algorithm: str
    modelopt: str
    calibration_prompts: int
    calibration_tokens: int
    bytes_before: int
    bytes_after: int
    layers: tuple[LayerReport, ...]
    probe: ProbeReport
    seconds: dict[str, float]

    @property
    def quantized(self) -> int:
        """Number of quantised matrices."""
        return sum(layer.quantized for layer in self.layers)

    def to_json(self) -> str:
        """The content of `report.json`."""
        counts = {"quantized": self.quantized, "kept": len(self.layers) - self.quantized}
        return json.dumps(counts | asdict(self), indent=2) + "\n"


@torch.inference_mode()
def next_token_log_probs(model: nn.Module, prompts: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """For each prompt of T tokens the distribution of every next token, float32 [T - 1, vocabulary] on the CPU."""
    for prompt in prompts:
        logits = model(torch.tensor([prompt], device=current_device()), use_cache=False).logits[0, :-1]
        yield logits.float().log_softmax(-1).cpu()


def compare(prompts: Sequence[Sequence[int]], original: Sequence[Tensor], quantized: Iterator[Tensor]) -> ProbeReport:
    """Compare distributions of the same prompts, each as `next_token_log_probs` gives it."""
    differences: list[Tensor] = []
    divergences: list[Tensor] = []
    agreements: list[Tensor] = []
    for prompt, before, after in zip(prompts, original, quantized, strict=True):
        tokens = torch.tensor(prompt[1:]).unsqueeze(1)  # [T - 1, 1]
        differences.append((after.gather(1, tokens) - before.gather(1, tokens)).squeeze(1))
        divergences.append((before.exp() * (before - after)).sum(-1))
        agreements.append(before.argmax(-1) == after.argmax(-1))
    difference = torch.cat(differences).double()
    return ProbeReport(
        prompts=len(prompts),
        tokens=len(difference),
        mean_difference=difference.mean().item(),
        mean_abs_difference=difference.abs().mean().item(),
        max_abs_difference=difference.abs().max().item(),
        mean_kl=torch.cat(divergences).double().mean().item(),
        top1_agreement=torch.cat(agreements).double().mean().item(),
    )


def print_report(report: QuantizeReport, console: Console) -> None:
    """Print the layers, those that differ in a number together, and the totals."""
    groups: dict[tuple[str, str], list[LayerReport]] = {}
    for layer in report.layers:
        status = "quantised" if layer.quantized else f"kept: {layer.reason}"
        groups.setdefault((re.sub(r"\.\d+(?=\.|$)", ".*", layer.path), status), []).append(layer)
    table = Table(title=f"{report.format} ({report.algorithm}) of {escape(report.model)}")
    table.add_column("layer")
    table.add_column("")
    for heading in ("number", "MB before", "MB after", "largest error"):
        table.add_column(heading, justify="right")
    for (path, status), layers in sorted(groups.items()):
        before, after = sum(layer.bytes_before for layer in layers), sum(layer.bytes_after for layer in layers)
        errors = [layer.error for layer in layers if layer.error is not None]
        error = f"{max(errors):.2%}" if errors else ""
        table.add_row(
            escape(path), escape(status), str(len(layers)), f"{before / 1e6:.1f}", f"{after / 1e6:.1f}", error
        )
    console.print(table)
    probe = report.probe
    for line in (
        f"{report.quantized} matrices quantised, {len(report.layers) - report.quantized} kept; "
        f"{report.bytes_before / 1e6:.1f} MB -> {report.bytes_after / 1e6:.1f} MB",
        f"scales of inputs: from {report.calibration_tokens} tokens of {report.calibration_prompts} prompts"
        if report.calibration_prompts
        else "scales of inputs: taken at run time",
        f"log-probs of {probe.tokens} tokens of {probe.prompts} held-out prompts: mean difference "
        f"{probe.mean_difference:+.4f}, mean size {probe.mean_abs_difference:.4f}, largest "
        f"{probe.max_abs_difference:.4f}; mean KL {probe.mean_kl:.5f}; likeliest token the same for "
        f"{probe.top1_agreement:.1%}",
        f"{Path(report.out)}, each layer in its report.json",
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
