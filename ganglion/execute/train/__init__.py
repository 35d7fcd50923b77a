"""Where the parts are joined: build, parallelize, step, loop."""

from ganglion.execute.train.executor import StepResult
from ganglion.execute.train.job import (
    Job,
    build_blocks,
    build_job,
    open_source,
    outline_blocks,
    parallelize_file,
)
from ganglion.execute.train.loop import Observer, train
from ganglion.execute.train.memory_observer import MemoryObserver
from ganglion.execute.train.observers import file_observers
from ganglion.execute.train.parallelize import parallelize
from ganglion.execute.train.run import Run
from ganglion.execute.train.saved import with_saved_cut
from ganglion.execute.train.servers import serve_centers, workers_of

__all__ = [
    "Job",
    "MemoryObserver",
    "Observer",
    "Run",
    "StepResult",
    "build_blocks",
    "build_job",
    "file_observers",
    "open_source",
    "outline_blocks",
    "parallelize",
    "parallelize_file",
    "serve_centers",
    "train",
    "with_saved_cut",
    "workers_of",
]
