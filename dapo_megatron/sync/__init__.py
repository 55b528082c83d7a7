"""Weight transfer from the trainer to the vLLM servers."""
