"""Generation: vLLM servers and the controller that samples from them."""
