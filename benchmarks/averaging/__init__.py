"""Elastic averaging: the paper's methods on a virtual clock, and ours against torch DDP."""
