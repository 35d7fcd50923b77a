"""The engine: drives the schedule of one rank by the messages that arrive.

It starts actions and carries payloads and failures. How an action computes does not enter.
"""

from ganglion.execute.pipeline.engine.agreement import Agreement
from ganglion.execute.pipeline.engine.engine import Engine, StageActions

__all__ = ["Agreement", "Engine", "StageActions"]
