"""A job: what a run file describes, built and ready to train on this rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import nn

from ganglion.decide.config import (
    CHECKPOINTS,
    AveragingSection,
    RunFile,
    check_vocabulary,
    given_rates,
    model_shape,
    read_model,
)
from ganglion.decide.plan import Plan
from ganglion.decide.shapes import BuiltShape, GPTShape, ModelShape
from ganglion.decide.topology import Launch
from ganglion.errors import LayoutError
from ganglion.execute.averaging import own_address
from ganglion.execute.comm import World
from ganglion.execute.data import (
    DataSource,
    MapDataset,
    open_dataset,
    open_images,
    open_synthetic,
    open_text,
    read_batch,
    save_tokenizer,
)
from ganglion.execute.device import pick_device
from ganglion.execute.measure import MemoryWatch, Sample, count_flops, machine_peak
from ganglion.execute.models import (
    InitialWeights,
    LossFn,
    build_model,
    build_user_blocks,
    call_function,
    loss_function,
    named_blocks,
    named_parameters,
    outline_model,
)
from ganglion.execute.train.async_workers import store_of
from ganglion.execute.train.averaged import AveragingSettings
from ganglion.execute.train.parallelize import parallelize
from ganglion.execute.train.run import Run
from ganglion.execute.train.settings import ActivationSettings, RunSettings
from ganglion.execute.update import optimizer_factory, warmup_cosine
from ganglion.trace import Recorder

SYNTHETIC_VOCAB_SIZE = 256
# Whether samples are token ids; unknown for a data set of the user's own.
_HAS_TOKENS = {"text": True, "synthetic": True, "images": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One rank's share of a run file: the run, its data and its folder."""

    file: RunFile
    run: Run
    source: DataSource
    folder: Path
    peak_flops: float
    flops_per_token: float | None
    num_parameters: int
    memory: MemoryWatch
    shape: ModelShape | None  # of a built-in model

    def is_milestone(self, step: int) -> bool:
        """Return whether a step is evaluated or saved."""
        evaluates = self.source.held_out is not None and is_due(step, self.file.train.eval_every)
        return evaluates or is_due(step, self.file.checkpoint.every)

    @property
    def last_step(self) -> int:
        """The step at which this job stops."""
        return self.file.train.stop_at or self.file.train.steps

    @property
    def checkpoints(self) -> Path:
        """The folder of this run's checkpoints."""
        return self.folder / CHECKPOINTS

    @property
    def unit(self) -> str:
        """What is counted: tokens, or samples where there are none."""
        return "tokens" if self.source.tokens_per_sample > 1 else "samples"

    @property
    def tokens_per_step(self) -> int:
        """Tokens, or samples where there are none, of one global batch."""
        return self.run.plan.global_batch_size * self.source.tokens_per_sample


def is_due(step: int, every: int) -> bool:
    """Return whether a step is a multiple of `every`; 0: never."""
    return every > 0 and step % every == 0


def build_job(
    file: RunFile, plan: Plan, world: World, launch: Launch, folder: Path, cache_dir: Path
) -> Job:
    """Build everything a run file names; called by every rank at the same time."""
    device = pick_device(launch.local_rank)
    source = open_source(file, cache_dir)
    peak_flops = machine_peak(world, device, plan.computes_in)
    memory = MemoryWatch(device)  # what the data take is not the model's
    if world.rank == 0 and source.tokenizer is not None:
        save_tokenizer(source.tokenizer, folder)
    blocks, initial = outline_blocks(file, plan, source.num_classes, source.input_shape)
    num_parameters = sum(p.numel() for p in named_parameters(blocks).values())  # not of pieces
    loss_fn = loss_function(file.model.loss)
    flops = count_flops(blocks, loss_fn, *_samples(source.train, 1))
    sample = _samples(source.train, plan.microbatch_size) if plan.pipe > 1 else None
    run = parallelize_file(
        *(file, plan, world, device, blocks, initial, loss_fn, sample, folder), launch
    )
    return Job(
        file=file,
        run=run,
        source=source,
        folder=folder,
        peak_flops=peak_flops,
        flops_per_token=None if flops is None else flops / source.tokens_per_sample,
        num_parameters=num_parameters,
        memory=memory,
        shape=_known_shape(file, source.num_classes, source.input_shape),
    )


def build_blocks(
    file: RunFile, num_outputs: int, input_shape: tuple[int, ...]
) -> dict[str, nn.Module]:
    """Build the model of a run file, the same on every rank and for every layout."""
    torch.manual_seed(file.train.seed)
    if file.model.build:
        blocks = build_user_blocks(file.model.build, file.model.args)
        if file.model.description:
            _check_described(file, blocks)
        return blocks
    return named_blocks(build_model(_shape(file, num_outputs, input_shape)))


def _check_described(file: RunFile, blocks: Mapping[str, nn.Module]) -> None:
    """Refuse a description of another model than the one that was built."""
    found = read_model(file.model.description)
    described = f"model.description = {file.model.description!r}"
    built = f"model.build = {file.model.build!r} returned"
    remedy = "describe it again with `ganglion describe`"
    if found.num_blocks != len(blocks):
        raise LayoutError(
            f"{described} has {found.num_blocks} blocks, but {built} {len(blocks)}: {remedy}"
        )
    num_built = sum(p.numel() for p in named_parameters(blocks).values())
    if found.num_parameters != num_built:
        raise LayoutError(
            f"{described} has {found.num_parameters} parameters, but {built} {num_built}: {remedy}"
        )


def outline_blocks(
    file: RunFile, plan: Plan, num_outputs: int, input_shape: tuple[int, ...]
) -> tuple[dict[str, nn.Module], InitialWeights | None]:
    """Build the model of a run file without memory; return it with the weights of `build_blocks`.

    A model of the user's own is built with its weights, and None is returned instead.
    """
    if file.model.build:
        return build_blocks(file, num_outputs, input_shape), None
    shape = _shape(file, num_outputs, input_shape)
    if isinstance(shape, GPTShape) and file.model.vocab_size == 0:
        check_vocabulary(shape.vocab_size, plan)
    torch.manual_seed(file.train.seed)
    model, initial = outline_model(shape)
    return named_blocks(model), initial


def _known_shape(
    file: RunFile, num_outputs: int, input_shape: tuple[int, ...]
) -> ModelShape | None:
    """Return the shape of a built-in model or of a description; None if there is neither."""
    if file.model.description:
        return read_model(file.model.description)
    return None if file.model.build else _shape(file, num_outputs, input_shape)


def _shape(file: RunFile, num_outputs: int, input_shape: tuple[int, ...]) -> BuiltShape:
    return model_shape(
        file.model,
        num_outputs=num_outputs,
        input_shape=input_shape,
        tokens=_HAS_TOKENS.get(file.data.kind),
    )


def parallelize_file(
    file: RunFile,
    plan: Plan,
    world: World,
    device: torch.device,
    blocks: dict[str, nn.Module],
    initial: InitialWeights | None,
    loss_fn: LossFn,
    sample: Sample | None,
    folder: Path = Path(),
    launch: Launch | None = None,
) -> Run:
    """Return the run of blocks under a plan, all else as a run file says.

    What the disk tier needs goes into `folder`, unless the file names another. Servers are met as
    `launch` says, or the environment.
    """
    recorder = Recorder(world.rank, enabled=file.trace.enabled)
    recorder.offset_s = world.clock_offset_s()
    scratch = Path(file.memory.offload_dir) if file.memory.offload_dir else folder
    return parallelize(
        blocks,
        loss_fn,
        optimizer_factory(file.optimizer),
        plan,
        RunSettings(
            max_grad_norm=file.optimizer.max_grad_norm,
            error_feedback=file.optimizer.error_feedback,
            lr_factor=warmup_cosine(
                file.optimizer.warmup_steps,
                file.train.steps,
                file.optimizer.min_lr_fraction,
                decay=file.optimizer.schedule == "cosine",
            ),
            seed=file.train.seed,
            timeout_s=file.train.timeout_s,
            sample=sample,
            initial=initial,
            averaging=_met(_averaging(file.averaging), plan, launch, file.train.timeout_s),
            keep_freed=file.memory.device_gib == 0,
            offload_dir=scratch,
            activations=ActivationSettings(folder=scratch),
        ),
        world=world,
        device=device,
        recorder=recorder,
    )


def _met(
    settings: AveragingSettings, plan: Plan, launch: Launch | None, timeout_s: float
) -> AveragingSettings:
    """Return the settings with where servers are met, which a launch may know better than we."""
    if launch is None or not plan.servers:
        return settings
    store = store_of(launch, plan, timeout_s)
    return replace(settings, store=store, listen_on=own_address(launch))


def _averaging(section: AveragingSection) -> AveragingSettings:
    rates = given_rates(section)
    return AveragingSettings(
        alpha=rates.get("alpha"),
        beta=rates.get("beta"),
        rho=rates.get("rho"),
        tau=section.tau,
        overlap=section.overlap,
        unsafe=section.unsafe,
        outer_lr=section.outer_lr or None,
        outer_momentum=section.outer_momentum or None,
        center_momentum=section.center_momentum or None,
        max_staleness=section.max_staleness or None,
    )


def open_source(file: RunFile, cache_dir: Path) -> DataSource:
    """Open the data that a run file names."""
    data, seed = file.data, file.train.seed
    if data.kind == "text":
        return open_text(
            data.source,
            data.tokenizer,
            data.bpe_vocab_size,
            data.seq_len,
            data.val_fraction,
            seed,
            cache_dir,
        )
    if data.kind == "images":
        return open_images(data.source, data.val_fraction, seed)
    if data.kind == "synthetic":
        vocab_size = file.model.vocab_size or SYNTHETIC_VOCAB_SIZE
        return open_synthetic(data.seq_len, vocab_size, data.val_fraction, seed)
    dataset = call_function(data.source, data.args, key="data.source", args_key="data.args")
    return open_dataset(cast(MapDataset, dataset), data.val_fraction, seed)


def _samples(dataset: MapDataset, count: int) -> Sample:
    """Return the first few samples as one microbatch."""
    return read_batch(dataset, [number % len(dataset) for number in range(count)])
