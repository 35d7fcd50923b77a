"""Elastic averaging of an unchanged training loop, in three lines around an ordinary optimizer.

    average = ElasticAverage(model, optimizer, beta=0.9, tau=10)     # 1
    with average:                                                    # 2
        for x, y in batches:
            loss_fn(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    with average.center_weights():                                   # 3
        evaluate(model)

Hooks on the optimizer's step and on the model's forward drive a Method; see methods/method.py.
Start the script once for each worker, with torchrun, srun or mpiexec, or alone. With servers=K,
start K more processes:

    average = ElasticAverage(model, optimizer, mode="async", beta=0.9, servers=1)
    if average.is_server:
        average.serve()          # then exit; else train as above
"""

from __future__ import annotations

import atexit
import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ganglion.decide.plan import ASYNC_MODES, SYNC
from ganglion.decide.schedules.exchanges import SyncExchange
from ganglion.decide.topology import read_launch
from ganglion.errors import ConfigError
from ganglion.execute.averaging.common_start import common_start
from ganglion.execute.averaging.methods import (
    BREAKDOWN,
    MEAN_OF,
    ExchangeMetrics,
    Method,
    OuterAveraging,
    OuterFactory,
    Packed,
    State,
    Stopwatch,
    SyncEasgd,
)
from ganglion.execute.averaging.options import AveragingOptions
from ganglion.execute.averaging.saved import (
    CENTER_ONLY,
    FULL,
    check_state,
    load_center,
    load_full,
    save_center,
    save_full,
    saved_center,
    saved_velocity,
)
from ganglion.execute.averaging.served import (
    CenterHost,
    ServerMetrics,
    announce_end,
    async_method,
    own_server,
)
from ganglion.execute.averaging.sync_factory import check_digests, sync_method
from ganglion.execute.averaging.two_level import two_level
from ganglion.execute.averaging.workers import find_workers, own_address
from ganglion.execute.comm import World, open_store


class ElasticAverage:
    """Averages a model with the models of other workers while an optimizer trains it.

    `mode` "sync" is Sync EASGD, with exactly one rate of alpha, beta and rho; an optimizer
    `outer(parameters)` replaces the rate, with its pull `q`, `delay` and `fragments`. "async",
    "round_robin" and "hogwild" are elastic without waiting for other workers. "sync_sgd" reduces
    gradients by `reduction`; "async_sgd" (with `center_momentum`) and "hogwild_sgd" add updates to
    the centre. `max_staleness` bounds the versions of it that an asynchronous write may have
    missed, by default 4 for each worker. Workers exchange every `tau` steps. `center` is
    "replicated", "delta", "root" or "host_root" for synchronous modes, else "server" or
    "sharded:K". With `overlap`, exchanges run beside forward and backward. One message carries all
    weights, unless `bucket_mb` bounds it or `pack=False` sends each tensor alone. `compress` is
    None, "bf16", "fp16" or "int8". Every `inner` processes are one worker. `deterministic` fixes
    the order of all sums, on any carrier. The last `servers` processes hold the centre, a part
    each, and do not train. All workers start with the weights of the first. Without a `world`, the
    processes of the launcher's environment are used.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        mode: str = SYNC,
        alpha: float | None = None,
        beta: float | None = None,
        rho: float | None = None,
        amortise: bool = False,
        unsafe: bool = False,
        tau: int = 10,
        outer: OuterFactory | None = None,
        q: float = 1.0,
        delay: int = 0,
        fragments: int = 1,
        center: str | None = None,
        overlap: bool = True,
        pack: bool = True,
        bucket_mb: float | None = None,
        compress: str | None = None,
        reduction: str = MEAN_OF,
        center_momentum: float = 0.0,
        max_staleness: int | None = None,
        inner: int = 1,
        deterministic: bool = False,
        servers: int = 0,
        world: World | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        """Prepare to average `model`, which `optimizer` trains; all workers do so together."""
        self._options = AveragingOptions(
            mode=mode,
            alpha=alpha,
            beta=beta,
            rho=rho,
            amortise=amortise,
            unsafe=unsafe,
            tau=tau,
            outer=outer,
            q=q,
            delay=delay,
            fragments=fragments,
            center=center,
            overlap=overlap,
            pack=pack,
            bucket_mb=bucket_mb,
            compress=compress,
            reduction=reduction,
            center_momentum=center_momentum,
            max_staleness=max_staleness,
            servers=servers,
        )
        self._model, self._optimizer = model, optimizer
        self._how_to_meet = (os.environ, inner, deterministic, timeout_s)
        self._packed, self._watch = Packed(model), Stopwatch()
        self._hooks: list[RemovableHandle] = []
        self._is_swapped = self._is_closed = False
        self._host: CenterHost | None = None
        self._joined: Method | None = None
        self._server = own_server(self._options, world, *self._how_to_meet)
        if self._server is None:
            self._joined = self._join(world, None)
        if self._host is not None:
            atexit.register(self.close)  # others may still need the centre that this worker serves

    @property
    def _method(self) -> Method:
        if self._joined is None:
            raise ConfigError(
                "this process serves the centre and is no worker: call serve() where is_server"
            )
        return self._joined

    @_method.setter
    def _method(self, method: Method) -> None:
        self._joined = method

    def _join(self, world: World | None, old: SyncEasgd | OuterAveraging | None) -> Method:
        """Return the method among the workers of `world`, with their common start or state."""
        self._workers = find_workers(world, *self._how_to_meet, self._options.servers)
        state = common_start(self._packed, self._workers.everyone, old, self._options.terms())
        if old is not None and state is not None:
            old.catch_up(state["center"], int(state["version"]), self._lr())
        method = self._build(None if old is None else old.turns)
        if state is not None:
            method.load_state_dict(state)
        return method

    def _build(self, turns: SyncExchange | None) -> Method:
        options, packed, workers = self._options, self._packed, self._workers
        if workers.inside.size > 1:
            return two_level(options, packed, workers, self._lr())
        if options.mode not in ASYNC_MODES:
            return sync_method(options, packed, workers.between, self._lr(), turns)
        environment, _, deterministic, timeout_s = self._how_to_meet
        if deterministic:
            raise ConfigError(
                f'deterministic=True has no meaning with mode = "{options.mode}", which sums in '
                f'the order of arrival: leave it out, or give mode="sync"'
            )
        launch = read_launch(environment)
        store = open_store(launch, timeout_s) if options.servers else None
        listen_on = own_address(launch) if workers.is_owner else None
        method, self._host = async_method(
            options, packed, workers.between, self._lr, timeout_s, store, listen_on
        )
        if store is not None and workers.index == 0:
            announce_end(store)
        return method

    # --- processes that serve ------------------------------------------------------------------

    @property
    def is_server(self) -> bool:
        """Whether this process holds the centre and does not train."""
        return self._server is not None

    def serve(
        self,
        *,
        listen_on: str | None = None,
        snapshots: str | Path | None = None,
        every: int = 100,
    ) -> ServerMetrics:
        """Hold this process's part of the centre until all workers have left.

        Workers of other hosts connect to the address `listen_on`, by default that of this host
        towards the first process. With a folder `snapshots`, the part is saved there after every
        `every` writes, and a server that replaces a lost one continues from it.
        """
        if self._server is None:
            raise ConfigError("this process is a worker: call serve() only where is_server")
        address = own_address(read_launch(self._how_to_meet[0])) if listen_on is None else listen_on
        folder = None if snapshots is None else Path(snapshots)
        (seen,) = self._server.serve(listen_on=address, snapshots=folder, every=every)
        return seen

    # --- around the loop -----------------------------------------------------------------------

    def __enter__(self) -> ElasticAverage:
        """Hook into the optimizer's steps."""
        assert self._method, "a server raises here"
        if self._hooks:
            raise ConfigError("this ElasticAverage is entered already: use one `with` at a time")
        self._hooks = [
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
            self._model.register_forward_pre_hook(self._begin_pass),
        ]
        self._watch.resume()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the hooks; finish exchanges in flight, unless something failed."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if error is None:
            self.flush()
        else:
            atexit.unregister(self.close)  # after a failure, no worker is waited for

    def sync_now(self) -> None:
        """Exchange now, regardless of tau; synchronous workers call it together."""
        self._refuse_while_swapped("sync_now()")
        self._method.sync_now(self._lr())

    def flush(self) -> None:
        """Finish exchanges in flight; synchronous workers call it together."""
        self._method.flush()

    def regroup(self, world: World) -> None:
        """Continue among the workers of another world, after losses or with newcomers.

        Newcomers make their ElasticAverage in that world at the same time, and start at the
        centre. All give up exchanges in flight.
        """
        self._refuse_while_swapped("regroup()")
        if not isinstance(self._method, SyncEasgd | OuterAveraging):
            raise ConfigError(
                f"{type(self._method).__name__} cannot change its workers: only Sync EASGD and "
                f"outer optimizers with inner=1 do; restart from a checkpoint of the centre"
            )
        self._method.abandon()
        left = self._workers
        self._method = self._join(world, self._method)
        left.close()

    def repack(self) -> None:
        """Move weights back into packed memory after .to() or an assignment."""
        self._packed.repack()

    def close(self) -> None:
        """Leave the other workers; a worker that serves a centre waits until all have left."""
        atexit.unregister(self.close)
        if self._is_closed or self.is_server:
            return
        self._is_closed = True
        self._method.close()
        if self._host is not None:
            self._host.close()
        self._workers.close()

    # --- the centre ----------------------------------------------------------------------------

    @contextmanager
    def center_weights(self) -> Iterator[nn.Module]:
        """Give the model the weights of the centre inside the block, to evaluate or save them."""
        self._refuse_while_swapped("center_weights()")
        worker = self._packed.gather()
        kept = worker.clone()
        self._set(self._method.center())
        self._is_swapped = True
        try:
            yield self._model
        finally:
            self._is_swapped = False
            self._set(kept)

    def check_center(self) -> int:
        """Return the digest of the centre; raise ProtocolError if it differs between workers.

        Synchronous workers call it together, and only where each has the centre.
        """
        return check_digests(self._method.center(), self._workers.between)

    def metrics(self) -> ExchangeMetrics:
        """Return the measurements of this worker's exchanges so far."""
        metrics = self._method.metrics()
        spent = metrics.seconds or {"param_dev_dev": metrics.wait_s}
        own = self._watch.seconds(sum(spent.values()))
        seconds = {**dict.fromkeys(BREAKDOWN, 0.0), **own, "param_dev_dev": 0.0, **spent}
        return dataclasses.replace(metrics, seconds=seconds)

    # --- checkpoints ---------------------------------------------------------------------------

    def state_dict(self, kind: str = FULL) -> State:
        """Return a checkpoint of this worker ("full"), or of the centre alone ("center_only").

        Call it between two steps, on all workers or on one; every tensor is a copy.
        """
        self._refuse_while_swapped("state_dict()")
        if kind == CENTER_ONLY:
            return save_center(self._packed, self._method)
        if kind != FULL:
            raise ConfigError(f'kind = "{kind}" is not one of {[FULL, CENTER_ONLY]}')
        worker = self._workers
        return save_full(self._packed, self._optimizer, self._method, worker.index, worker.number)

    def load_state_dict(self, state: State) -> None:
        """Continue from a checkpoint; all workers load, each its own or that of the centre."""
        self._refuse_while_swapped("load_state_dict()")
        self._packed.check()
        if check_state(state) == CENTER_ONLY:
            load_center(self._packed, self._method, state)
        else:
            place = (self._workers.index, self._workers.number)
            load_full(self._packed, self._optimizer, self._method, state, *place)
        self._restore_served(state)

    def _restore_served(self, state: State) -> None:
        """Restore an asynchronous centre before any worker continues."""
        if self._host is not None:
            self._workers.between.barrier()
            self._host.restore(saved_center(self._packed, state), saved_velocity(state))
            self._workers.between.barrier()

    # --- hooks ---------------------------------------------------------------------------------

    def _begin_pass(self, model: nn.Module, inputs: Any) -> None:
        # Only passes that a step follows: one worker alone may evaluate.
        if model.training and torch.is_grad_enabled() and not self._is_swapped:
            self._watch.begin_pass()
            self._method.begin_pass()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._refuse_while_swapped("optimizer.step()")
        self._watch.end_pass()
        self._method.before_step(self._lr())

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._method.after_step(self._lr())
        self._watch.end_step()

    def _lr(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    def _set(self, flat: Tensor) -> None:
        worker = self._packed.gather()
        worker.copy_(flat)
        self._packed.scatter()

    def _refuse_while_swapped(self, what: str) -> None:
        if self._is_swapped:
            raise ConfigError(
                f"{what} was called inside center_weights(), where the model is not this worker's: "
                f"leave that block first"
            )
