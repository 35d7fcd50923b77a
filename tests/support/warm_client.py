"""`python ...` as a fork of a warm server: the program of warm_python.py.

It sends the server its arguments, folder, environment and open files, passes signals on to the fork
and ends as the fork ends. Started without site packages and with few imports, it takes 20 ms.
ADDRESS, the name of the server's socket, is defined in a line before these.
"""

import marshal
import os
import signal
import socket
import sys

PASSED_ON = {
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
}


def open_files() -> list[int]:
    """Return the numbers of all files that this process was given."""
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  pathlib takes 10 ms
        try:
            os.fstat(int(name))
        except OSError:  # that of the list itself
            continue
        found.append(int(name))
    return found


def request() -> tuple[socket.socket, int]:
    """Ask for a fork; return the connection and the number of the process."""
    files = open_files()
    server = socket.socket(socket.AF_UNIX)
    server.connect("\0" + ADDRESS)  # type: ignore[name-defined] # noqa: F821
    data = marshal.dumps((sys.argv[1:], os.getcwd(), dict(os.environ), files))  # noqa: PTH109
    socket.send_fds(server, [len(data).to_bytes(8, "little")], files)
    server.sendall(data)
    return server, int.from_bytes(server.recv(8), "little")


def end_as(status: int) -> None:
    """End this process in the way in which the fork ended."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def main() -> None:
    """Run the fork to its end."""
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    server, fork = request()
    for number in PASSED_ON:
        signal.signal(number, lambda received, _: os.kill(fork, received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    end_as(int.from_bytes(server.recv(8), "little", signed=True))


if __name__ == "__main__":
    main()
