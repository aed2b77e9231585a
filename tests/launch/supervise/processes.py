"""Run processes with a real heartbeat that stop, hang or die at a place that a test chooses.

Run as `python -m tests.launch.supervise.processes`.
"""

import ctypes
import os
import platform
import sys
import threading
import time
from pathlib import Path

from verl_patches.heartbeat import heartbeat


def is_there():
    print(os.getpid(), flush=True)


def waits():
    is_there()
    time.sleep(600)


def holds_the_gil():
    is_there()
    ctypes.PyDLL(None).sleep(600)


def leaves_a_thread():
    """End the main thread alone (exit(2)): the process is a zombie that holds its memory."""
    threading.Thread(target=time.sleep, args=(600,)).start()
    is_there()
    ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)


def main():
    folder, rank, work = Path(sys.argv[1]), int(sys.argv[2]), globals()[sys.argv[3]]
    heartbeat.current_heartbeat().start(folder, f"rank {rank}", rank)
    with heartbeat.current_heartbeat().in_call("compute_log_prob"):
        heartbeat.current_heartbeat().begin_phase("old_log_prob")
    with heartbeat.current_heartbeat().in_call("update_actor"):
        heartbeat.current_heartbeat().begin_phase("update")
        work()


if __name__ == "__main__":
    main()
