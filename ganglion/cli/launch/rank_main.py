"""One rank of a training, whether started here or by torch elastic, torchrun, srun or mpiexec."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from ganglion.cli.environment import cache_folder, cores_per_rank, log_to_file, log_to_screen
from ganglion.cli.folder import accept_resumed, prepare_folder, read_folder
from ganglion.cli.launch.progress import Progress
from ganglion.cli.launch.signals import StopSignal
from ganglion.cli.summary import print_summary
from ganglion.decide.config import CHECKPOINTS, LOGS, MODEL_FILE, RunFile
from ganglion.decide.plan import Plan
from ganglion.decide.predict import write_memory
from ganglion.decide.topology import Launch, read_launch
from ganglion.errors import CheckpointError, GanglionError
from ganglion.execute.checkpoint import latest_checkpoint
from ganglion.execute.comm import World, open_world
from ganglion.execute.train import (
    Job,
    MemoryObserver,
    Observer,
    build_job,
    file_observers,
    serve_centers,
    train,
    workers_of,
)

if TYPE_CHECKING:
    from ganglion.cli.train import TrainOptions

logger = logging.getLogger(__name__)

_REFUSED = "refused: "


def train_in_folder(
    folder: Path,
    launch: Launch,
    *,
    resume: bool,
    world: World | None = None,
    end_on_second: bool = True,
) -> int:
    """Train the run of a prepared folder; return 0, or 128 + signal when interrupted."""
    with StopSignal(end_on_second=end_on_second) as stop:
        file, plan = read_folder(folder, resumed=resume)
        log_to_file(folder / LOGS / f"rank{launch.rank}.log")
        torch.set_num_threads(file.train.threads or cores_per_rank(launch.local_num_ranks))
        logger.info(
            "rank %d of %d, started by %s, %d threads, plan %s",
            *(launch.rank, launch.num_ranks, launch.launcher, torch.get_num_threads(), plan),
        )
        if world is None and serve_centers(plan, launch, file.train.timeout_s):
            return stop.exit_code
        world = world or _open_world(file, plan, launch)
        if resume:
            from ganglion.execute.train import with_saved_cut

            plan = with_saved_cut(plan, folder / CHECKPOINTS, world)
        job = build_job(file, plan, world, launch, folder, cache_folder())
        with job.run:
            stop.call(job.run.request_stop)
            if resume:
                _resume(job)
            _train_watched(job)
            if world.rank == 0:
                _publish_model(folder)
        return stop.exit_code


def _open_world(file: RunFile, plan: Plan, launch: Launch) -> World:
    return open_world(
        workers_of(launch, plan),
        plan.mesh(),
        timeout_s=file.train.timeout_s,
        transport=file.parallel.transport,
        meets_alone=plan.servers > 0,
    )


@record
def train_under_launcher(
    file: RunFile, plan: Plan, name: str, launch: Launch, options: TrainOptions
) -> int:
    """Train as one of the processes that a launcher started; rank 0 makes the folder."""
    with meeting_place(launch, plan, file.train.timeout_s) as launch:
        return _train_launched(file, plan, name, launch, options)


def meeting_place(launch: Launch, plan: Plan, timeout_s: float) -> AbstractContextManager[Launch]:
    """Return the launch, with a meeting point of servers and workers where mpiexec gives none."""
    if launch.launcher != "mpiexec" or not plan.servers:
        return nullcontext(launch)
    from ganglion.execute.comm.mpi import meeting_point

    return meeting_point(launch, timeout_s)


def _train_launched(
    file: RunFile, plan: Plan, name: str, launch: Launch, options: TrainOptions
) -> int:
    if serve_centers(plan, launch, file.train.timeout_s):
        return 0
    world = _open_world(file, plan, launch)
    folder = Path(_agree_on_folder(world, file, plan, name, options.resume))
    code = train_in_folder(folder, launch, resume=options.resume, world=world)
    if launch.rank == 0:
        print_summary(folder, code)
    return code


def _agree_on_folder(world: World, file: RunFile, plan: Plan, name: str, resume: bool) -> str:
    """Return the folder that rank 0 prepared; raise its error on every rank."""
    answer = ""
    if world.rank == 0:
        try:
            answer = str(prepare_folder(file, plan, name, resume=resume).absolute())
        except GanglionError as error:
            answer = _REFUSED + str(error)
    answer = world.broadcast_text(answer)
    if answer.startswith(_REFUSED):
        raise GanglionError(answer.removeprefix(_REFUSED))
    return answer


def _resume(job: Job) -> None:
    if not job.run.load(job.checkpoints):
        raise CheckpointError(
            f"--resume found no checkpoint below {job.checkpoints}: leave out --resume and name "
            f"another output.dir to start again"
        )
    if job.run.step >= job.last_step:
        raise CheckpointError(
            f"the run is at step {job.run.step} already and was to end at step {job.last_step}: "
            f"raise train.steps or train.stop_at to go on"
        )
    if job.run.world.rank == 0:
        accept_resumed(job.folder)


def _train_watched(job: Job) -> None:
    memory = MemoryObserver(job)
    observers: list[Observer] = [memory, *file_observers(job)]
    if job.run.world.rank == 0:
        observers.append(Progress(job))
    try:
        train(job, observers)
    finally:
        for observer in observers:
            observer.close()
    gathered = memory.gathered()
    if job.run.world.rank == 0:
        write_memory(
            job.folder,
            gathered,
            file=job.file,
            plan=job.run.plan,
            shape=job.shape,
            device=job.run.device.type,
        )
    job.run.world.barrier()  # the traces of all ranks are complete from here on


def _publish_model(folder: Path) -> None:
    """Link the newest exported weights into the top of the run folder."""
    newest = latest_checkpoint(folder / CHECKPOINTS)
    if newest is not None:
        target = folder / MODEL_FILE
        target.unlink(missing_ok=True)
        try:
            os.link(newest / MODEL_FILE, target)
        except OSError:  # a file system without hard links: the same content, twice
            shutil.copyfile(newest / MODEL_FILE, target)


def main(folder: str, log_level: str, resume: str) -> None:
    """Train as a rank that `ganglion train` started."""
    log_to_screen(log_level, sys.stdout)
    launch = read_launch(os.environ)
    # The parent forwards requests to stop, and a service manager may signal every process too, so
    # two signals can be one request here. The parent ends this rank itself.
    train_in_folder(Path(folder), launch, resume=bool(resume), end_on_second=False)
