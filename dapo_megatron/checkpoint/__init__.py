"""Hugging Face checkpoints, read and written tensor by tensor."""
