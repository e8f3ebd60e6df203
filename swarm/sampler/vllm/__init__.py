"""The engine for real GPUs: vLLM, with weights that change beneath running requests."""
