"""An interpreter that begins with torch imported: for programs that start `sys.executable`.

    mpiexec -n 2 WARM_PYTHON -m module         two forks of a server, each watched by a process:

    mpiexec --- client (tests/support/warm_client.py) <--- status of the end --- watcher
                                              --- end of the stream ---> watcher --- kills ---> fork

A client and its fork end together, whichever of them is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import marshal
import os
import secrets
import select
import signal
import socket
import sys
import tempfile
from multiprocessing import util
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.support.warm import CONTEXT, run_program

_BACKLOG = 64
_NUM_FILES = 250
FOLDER_PREFIX = "warm-python-"
SERVERS: list[BaseProcess] = []  # at most one


@functools.cache
def warm_python() -> str:
    """Return the path of the interpreter; its server ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    address = f"ganglion-tests-{secrets.token_hex(16)}"
    client = Path(__file__).with_name("warm_client.py").read_text()
    program = folder / "python"
    program.write_text(f"#!{sys.executable} -IS\nADDRESS = {address!r}\n{client}")
    program.chmod(0o755)
    server = CONTEXT.Process(target=_serve, args=(address, str(program)), daemon=True)
    server.start()
    SERVERS.append(server)
    return str(program)


def _serve(address: str, program: str) -> None:
    """Fork a watcher for every client."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for the watchers
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0" + address)
    listener.listen(_BACKLOG)
    while True:
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            with contextlib.suppress(ConnectionError):
                _watch(connection, program)
            os._exit(0)
        connection.close()


def _watch(client: socket.socket, program: str) -> None:
    """Fork the program; send its status to the client, and end it when the client is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, files, _, _ = socket.recv_fds(client, 8, _NUM_FILES)
    arguments, cwd, env, numbers = marshal.loads(_receive(client, int.from_bytes(size, "little")))
    fork = os.fork()
    if not fork:
        client.close()
        _take(dict(zip(numbers, files, strict=True)))
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        util._finalizer_registry.clear()  # type: ignore[attr-defined]  # those of the server
        run_program(arguments, cwd, env, program)
    for file in files:
        os.close(file)
    client.sendall(fork.to_bytes(8, "little"))
    ended = os.pidfd_open(fork)
    if ended not in select.select([client, ended], [], [])[0]:
        os.kill(fork, signal.SIGKILL)
    _, status = os.waitpid(fork, 0)
    client.sendall(status.to_bytes(8, "little", signed=True))


def _receive(client: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = client.recv(size - len(data))
        if not part:
            raise ConnectionError
        data += part
    return bytes(data)


def _take(files: dict[int, int]) -> None:
    """Give files the numbers that they have in the client."""
    above = max([*files, *files.values()]) + 1
    # First out of the way: the number of one file may be the goal of another.
    moved = {number: fcntl.fcntl(file, fcntl.F_DUPFD, above) for number, file in files.items()}
    for file in files.values():
        os.close(file)
    for number, file in moved.items():
        os.dup2(file, number)
        os.close(file)
