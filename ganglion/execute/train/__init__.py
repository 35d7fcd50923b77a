"""Train: join the parts of a run, from blocks and a plan or from a run file, and loop over steps.

Nothing else in the package imports it, except commands and what is public.
"""

from ganglion.execute.train.async_workers import serve_centers, workers_of
from ganglion.execute.train.averaged import AveragingSettings
from ganglion.execute.train.job import (
    Job,
    build_blocks,
    build_job,
    open_source,
    outline_blocks,
    parallelize_file,
)
from ganglion.execute.train.loop import Observer, train
from ganglion.execute.train.observers import MemoryObserver, file_observers
from ganglion.execute.train.parallelize import parallelize
from ganglion.execute.train.profiled import time_engine, time_models
from ganglion.execute.train.run import Run
from ganglion.execute.train.saved import with_saved_cut
from ganglion.execute.train.settings import ActivationSettings, RunSettings
from ganglion.execute.update import StepResult

__all__ = [
    "ActivationSettings",
    "AveragingSettings",
    "Job",
    "MemoryObserver",
    "Observer",
    "Run",
    "RunSettings",
    "StepResult",
    "build_blocks",
    "build_job",
    "file_observers",
    "open_source",
    "outline_blocks",
    "parallelize",
    "parallelize_file",
    "serve_centers",
    "time_engine",
    "time_models",
    "train",
    "with_saved_cut",
    "workers_of",
]
