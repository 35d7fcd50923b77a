"""Pipelines: ours against torch's, with a real model and with delayed messages."""
