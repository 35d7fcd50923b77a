"""The names of what a run folder holds, for those who write it and those who read it.

runs/quickstart-20260101-120000/
  run.toml plan.json          what was asked for, as resolved
  metrics.jsonl tensorboard/  what came out, step by step
  trace/ logs/                what each rank did and said
  checkpoints/                what to continue from
  model.safetensors           the weights at the end, under serial names
  prediction.json             of a pipeline: its steps beside the simulator's
  memory.json                 what each rank held, beside the memory model's prediction
"""

from __future__ import annotations

RUNS = "runs"
RUN_FILE = "run.toml"
PLAN_FILE = "plan.json"
METRICS_FILE = "metrics.jsonl"
TENSORBOARD = "tensorboard"
TRACE = "trace"
LOGS = "logs"
CHECKPOINTS = "checkpoints"
MODEL_FILE = "model.safetensors"
PREDICTION_FILE = "prediction.json"
MEMORY_FILE = "memory.json"
