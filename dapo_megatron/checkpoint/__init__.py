"""Hugging Face checkpoints, read and written tensor by tensor. Importing this package loads no torch."""

SINGLE = "model.safetensors"  # all weights, where one file is enough
INDEX = "model.safetensors.index.json"  # else: which file holds which tensor
