"""The run file: every section, key, default and comment, validated by pydantic.

A field's description is the comment that `--print-config` writes above it, so this file is also
the reference manual of the run file.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from ganglion.decide.topology import DEFAULT_RANK_ORDER


class Section(BaseModel):
    """Base of the sections: unknown keys are errors, values do not change once read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSection(Section):
    """What is trained."""

    kind: Literal["gpt", "mlp", "conv"] = Field("gpt", description="built-in model to train")
    build: str = Field(
        "",
        description='your own model instead: "package.module:function" that returns ordered blocks',
    )
    args: dict[str, str | int | float | bool] = Field(
        default_factory=dict, description="keyword arguments for `build`"
    )
    description: str = Field(
        "",
        description="a model in numbers, for predictions: of `build`, or alone without training; a "
        '.json file of `ganglion describe`, or a name such as "gpt-12b"',
    )
    loss: str = Field(
        "cross_entropy",
        description='"cross_entropy", "mse" or your own "package.module:function"',
    )
    layers: int = Field(4, ge=1, description="number of layers")
    hidden: int = Field(256, ge=1, description="width of the model")
    heads: int = Field(4, ge=1, description="attention heads (gpt)")
    kv_heads: int = Field(0, ge=0, description="key and value heads (gpt); 0: as many as heads")
    head_size: int = Field(0, ge=0, description="width of a head (gpt); 0: hidden / heads")
    mlp_hidden: int = Field(0, ge=0, description="inner width of the MLP (gpt); 0: 4 * hidden")
    positions: Literal["rotary", "learned"] = Field("rotary", description="position code (gpt)")
    tied_embedding: bool = Field(False, description="share embedding and head weights (gpt)")
    bias: bool = Field(False, description="bias terms in linear layers and norms (gpt)")
    vocab_size: int = Field(0, ge=0, description="token ids (gpt); 0: as many as the tokenizer has")


class DataSection(Section):
    """What it is trained on."""

    kind: Literal["text", "images", "synthetic", "dataset"] = Field(
        "text", description="text, images (IDX files), synthetic tokens, or a Dataset of your own"
    )
    source: str = Field(
        "",
        description='text: "" (Python\'s own library), a file or a folder; images: "generated", '
        '"fashion-mnist" or a folder of IDX files; dataset: "package.module:function"',
    )
    args: dict[str, str | int | float | bool] = Field(
        default_factory=dict, description="dataset: keyword arguments for the function"
    )
    tokenizer: Literal["bytes", "bpe"] = Field(
        "bytes", description='"bytes", or "bpe" trained on the source (needs the extra `hf`)'
    )
    bpe_vocab_size: int = Field(4096, ge=257, description="token ids of a BPE tokenizer")
    seq_len: int = Field(128, ge=1, description="tokens of one sample (text, synthetic)")
    val_fraction: float = Field(0.02, ge=0, lt=1, description="share of the samples held out")


class ParallelSection(Section):
    """How the processes share the work."""

    data: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description='replicas of the model; "auto": processes / (pipe * x * y * z)'
    )
    pipe: int = Field(1, ge=1, description="pipeline stages")
    x: int = Field(1, ge=1, description="tensor axis x: splits the outputs of a layer")
    y: int = Field(1, ge=1, description="tensor axis y: splits the inputs of a layer")
    z: int = Field(1, ge=1, description="tensor axis z: splits the batch and the stored weights")
    schedule: str = Field(
        "one_f_one_b",
        description='pipeline schedule (also 1f1b, 2bw, axonn), or your own "package.module:name"',
    )
    limit: int = Field(
        0, ge=0, description="message_driven: most microbatches in flight; 0: 2 * pipe"
    )
    extra: int = Field(0, ge=0, description="two_bw: raise the in-flight cap of every stage by it")
    chunks: int = Field(
        0, ge=0, description="interleaved: stages a rank holds; 0: the schedule's own, 2"
    )
    priority: str = Field(
        "", description='message_driven: "backward" first (""), "forward", or order of "arrival"'
    )
    stage_boundaries: list[int] = Field(
        default_factory=list,
        description="first block of each stage but the first, pipe * chunks - 1 cuts; []: balanced",
    )
    rank_order: list[str] = Field(
        default=list(DEFAULT_RANK_ORDER), description="axes from innermost to outermost"
    )
    transport: Literal["auto", "shm", "torch", "mpi"] = Field(
        "auto",
        description='how ranks talk: "auto" (shared memory inside a host, torch.distributed '
        'between hosts and for GPUs), "shm", "torch", or "mpi" (needs the extra `mpi`)',
    )
    overlap: bool = Field(
        True,
        description="reduce gradients, gather and sum pieces of weights while something computes "
        "(a pipeline's reductions always do)",
    )
    keep_gathered: bool = Field(
        False,
        description="keep weights gathered over z until they change: more memory, less traffic",
    )
    keep_gathered_mib: float = Field(
        0.0,
        ge=0,
        description="keep only so many, from the first layer on, as fit into it on each rank; 0: "
        "as keep_gathered says",
    )
    share_pieces: bool = Field(
        True,
        description="ranks along z that share memory (one host, one stage) read each other's "
        "pieces of weights where they are, and gather nothing",
    )
    bucket_mib: float = Field(25.0, gt=0, description="size of one gradient bucket")


class OptimizerSection(Section):
    """How weights are updated."""

    name: Literal["adamw", "sgd", "muon"] = Field(
        "adamw", description="adamw, sgd, or muon (matrices; adamw for the rest)"
    )
    lr: float = Field(1e-3, gt=0, description="peak learning rate")
    weight_decay: float = Field(
        0.1,
        ge=0,
        description="of matrices: decoupled (adamw, muon), or added to gradients (sgd)",
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="adamw: decay of the first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="adamw: decay of the second moment")
    eps: float = Field(1e-8, gt=0, description="adamw: added to the denominator")
    momentum: float = Field(0.95, ge=0, lt=1, description="sgd and muon: momentum")
    max_grad_norm: float = Field(1.0, ge=0, description="clip the global norm; 0: do not")
    error_feedback: bool = Field(
        False, description="correct updates made from late gradients (schedule two_bw only)"
    )
    schedule: Literal["cosine", "constant"] = Field("cosine", description="after the warm-up")
    warmup_steps: int = Field(10, ge=0, description="steps of linear warm-up")
    min_lr_fraction: float = Field(0.1, ge=0, le=1, description="cosine ends at this share of lr")


class TrainSection(Section):
    """How long and how much at a time."""

    steps: int = Field(100, ge=1, description="optimizer updates of the whole run")
    stop_at: int = Field(0, ge=0, description="stop early at this step, with a checkpoint; 0: no")
    global_batch_size: int = Field(16, ge=1, description="samples of one step over all processes")
    microbatch_size: int = Field(4, ge=1, description="samples of one forward and backward pass")
    precision: Literal["fp32", "bf16", "bf16_master", "fp16_master"] = Field(
        "fp32",
        description='"fp32"; "bf16" autocast; "bf16_master", "fp16_master": weights and gradients '
        "in half precision, fp32 masters and optimizer state (fp16: with a dynamic loss scale)",
    )
    seed: int = Field(0, ge=0, description="of weights, batches and dropout")
    eval_every: int = Field(0, ge=0, description="steps between evaluations; 0: at the end only")
    eval_batches: int = Field(4, ge=1, description="global batches of one evaluation")
    threads: int = Field(0, ge=0, description="compute threads a process; 0: cores / processes")
    timeout_s: float = Field(300.0, gt=0, description="longest wait for another rank")


class CheckpointSection(Section):
    """What is kept."""

    every: int = Field(0, ge=0, description="steps between checkpoints; 0: at the end only")
    keep: int = Field(2, ge=1, description="how many of the newest to keep")


class OutputSection(Section):
    """Where results go."""

    dir: str = Field("", description='run folder; "": runs/NAME-DATE-TIME')
    tensorboard: bool = Field(True, description="write TensorBoard event files")
    sample_tokens: int = Field(160, ge=0, description="length of the sample shown at the end (gpt)")
    sample_prompt: str = Field("def ", min_length=1, description="how that sample begins")


class TraceSection(Section):
    """What is recorded about time."""

    enabled: bool = Field(True, description="write trace/rank*.jsonl: one event per action")


class AveragingSection(Section):
    """Replicas as workers of elastic averaging."""

    method: Literal[
        "none",
        "sync_easgd",
        "local_sgd",
        "slow_momentum",
        "diloco",
        "original_easgd",
        "async_easgd",
        "async_measgd",
        "async_sgd",
        "async_msgd",
        "hogwild_easgd",
        "hogwild_sgd",
    ] = Field(
        "none",
        description='"none": replicas sum their gradients at every step; "sync_easgd": each trains '
        'by itself and is drawn to a centre; "local_sgd": all go to their mean; "slow_momentum", '
        '"diloco": the mean moves with momentum; original_, async_ and hogwild_: workers exchange '
        "with a centre one by one and wait for nobody",
    )
    tau: int = Field(10, ge=1, description="steps between two exchanges")
    beta: float = Field(
        0.0, ge=0, description="how far the centre moves in an exchange; 0: 0.9, if no other rate"
    )
    alpha: float = Field(
        0.0, ge=0, description="how far each worker moves, beta / workers; 0: not given"
    )
    rho: float = Field(0.0, ge=0, description="alpha / learning rate; 0: not given")
    unsafe: bool = Field(False, description="allow beta above 1")
    overlap: bool = Field(True, description="exchange while forward and backward compute")
    outer_lr: float = Field(
        0.0, ge=0, description="slow_momentum, diloco: rate of the centre; 0: 1 and 0.7"
    )
    outer_momentum: float = Field(
        0.0, ge=0, lt=1, description="slow_momentum, diloco: of the centre; 0: 0.5 and 0.9"
    )
    center_momentum: float = Field(
        0.0, ge=0, lt=1, description="async_msgd: momentum at the centre; 0: 0.9"
    )
    max_staleness: int = Field(
        0, ge=0, description="versions of the centre a late write may have missed; 0: 4 a worker"
    )
    servers: int = Field(
        0, ge=0, description="async_, original_: processes that hold the centre; 0: worker 0 does"
    )


class MemorySection(Section):
    """What is kept in memory."""

    device_gib: float = Field(
        0.0,
        ge=0,
        description="memory that a rank may use: what is not set here is chosen to fit; 0: no "
        "limit is known",
    )
    recompute: Literal["none", "full", "sqrt", "blocks", "budget"] = Field(
        "none",
        description='"full": keep the inputs of blocks alone, compute the rest again in backward; '
        '"sqrt": keep those of segments of about sqrt(all blocks); "blocks": of some; "budget": of '
        "as few as activation_mib allows",
    )
    recompute_every: int = Field(
        0, ge=0, description='"full": blocks of a segment, whose input is kept; 0: 1'
    )
    recompute_blocks: list[str] = Field(
        default_factory=list, description='"blocks": those computed again, as ["3", "4-6"]'
    )
    activation_mib: float = Field(
        0.0, ge=0, description='"budget": most MiB of activations on a rank; 0: not given'
    )
    offload_activations: Literal["none", "host", "disk"] = Field(
        "none", description="where activations wait for their backward: host memory, or a file"
    )
    compute_fp32: bool = Field(
        False,
        description="masters: store weights in half, but widen each block to fp32 while it runs; "
        "for processors that are slow in half precision",
    )
    offload: Literal["none", "host", "disk"] = Field(
        "none",
        description="where optimizer state (and masters) live between updates: with the weights, "
        'in "host" memory (of a GPU), or on "disk"; brought in bucket by bucket',
    )
    offload_dir: str = Field("", description='disk: folder of the scratch file; "": the run folder')
    bucket_size: int = Field(
        4194304, ge=2048, description="offload: elements of one bucket; three are in memory"
    )


class RunFile(Section):
    """A whole run file."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    parallel: ParallelSection = ParallelSection()
    optimizer: OptimizerSection = OptimizerSection()
    train: TrainSection = TrainSection()
    checkpoint: CheckpointSection = CheckpointSection()
    output: OutputSection = OutputSection()
    trace: TraceSection = TraceSection()
    averaging: AveragingSection = AveragingSection()
    memory: MemorySection = MemorySection()
