"""Tensor parallelism: ours against DTensor and FSDP2, and what overlap hides."""
