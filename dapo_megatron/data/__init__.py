"""Prompts: loaded or generated, tokenised, and drawn in a resumable order. Nothing here loads torch."""
