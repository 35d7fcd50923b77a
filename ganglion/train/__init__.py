"""Where the parts are joined: build, parallelize, step, loop."""

from ganglion.train.executor import StepResult
from ganglion.train.job import Job, build_blocks, build_job
from ganglion.train.loop import Observer, train
from ganglion.train.memory_observer import MemoryObserver
from ganglion.train.observers import file_observers
from ganglion.train.parallelize import parallelize
from ganglion.train.run import Run

__all__ = [
    "Job",
    "MemoryObserver",
    "Observer",
    "Run",
    "StepResult",
    "build_blocks",
    "build_job",
    "file_observers",
    "parallelize",
    "train",
]
