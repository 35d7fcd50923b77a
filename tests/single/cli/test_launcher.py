"""What a launch of local processes returns and prints when ranks fail, before and after signals."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ganglion.cli.launch import launcher

Run = Callable[[list[int], bool], int]
RECORD = {"message": {"message": "ConfigError: no", "extraInfo": {"timestamp": "1"}}}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that launches a rank which fails, after some signals."""

    def run_failing(received: list[int], has_message: bool) -> int:
        file = tmp_path / "error.json"
        if has_message:
            file.write_text(json.dumps(RECORD))
        failure = ProcessFailure(0, pid=1, exitcode=1 if has_message else -15, error_file=str(file))

        def fail(*_: object) -> None:
            raise ChildFailedError("rank", {0: failure})

        monkeypatch.setattr(launcher, "elastic_launch", lambda *_: fail)
        return launcher.run_processes(tmp_path, 1, False, "info", received, module="unused")

    return run_failing


@pytest.mark.parametrize("received", [[], [signal.SIGTERM]])
def test_a_failure_with_a_message_is_shown_also_after_one_signal(
    run: Run, received: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(received, True) == launcher.FAILED
    assert "rank 0 failed: ConfigError: no" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("received", "has_message"),
    [([signal.SIGTERM], False), ([signal.SIGTERM, signal.SIGINT], True)],
)
def test_ranks_ended_by_signals_have_not_failed(
    run: Run, received: list[int], has_message: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(received, has_message) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == ""
