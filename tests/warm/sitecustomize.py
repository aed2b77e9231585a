"""Hand this process over to the test session's warm interpreter (server.py), if it asks for that.

A process of Ray, or a rank, imports torch and some thousand modules of other libraries before it does anything: that
takes ten seconds of CPU and more, three to five times in every run of the loop. The server has imported them once.
A Python process with WARM_PYTHON=SOCKET in its environment and this folder on PYTHONPATH that runs Ray's
default_worker.py, or was started with `-X warm`, sends its command, environment, working folder and standard streams to
the server and waits for the fork that does its work: it passes signals on and ends as the fork ends. If the server
refuses, for example because a variable that libraries read when they are imported differs, the process goes on alone.
"""

import os
import sys


def hand_over(path: str) -> None:
    import json
    import signal
    import socket
    import struct

    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(path)
        except OSError:
            return  # the session has ended
        flags = {"warnings": sys.warnoptions, "paths": sys.path, "executable": sys.executable}
        asked = {"command": sys.orig_argv, "env": dict(os.environ), "folder": os.getcwd(), **flags}
        text = json.dumps(asked).encode()
        socket.send_fds(server, [struct.pack("!I", len(text))], [0, 1, 2])
        server.sendall(text)
        answers = server.makefile("rb")
        (fork,) = struct.unpack("!i", answers.read(4) or struct.pack("!i", 0))
        if not fork:
            return
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda received, frame: os.kill(fork, received))
        ended = answers.read(4)
    code = os.waitstatus_to_exitcode(struct.unpack("!i", ended)[0]) if ended else 70
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def asks_for_it() -> bool:
    script = "ray/_private/workers/default_worker.py"
    return "warm" in sys._xoptions or any(word.endswith(script) for word in sys.orig_argv[1:3])


if "WARM_PYTHON" in os.environ and asks_for_it():
    hand_over(os.environ["WARM_PYTHON"])
