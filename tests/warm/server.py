"""Fork Python processes that already have the third-party imports of a run's processes.

    python server.py SOCKET

Only libraries that do not import verl, Megatron, vLLM, MindSpeed or this project are imported ahead: those come in the
fork, after the prelude, as in a process started from nothing. Ray comes in the fork too: with it imported ahead a run
hangs (probably because its C++ settings are read at import).
"""

import ast
import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import inspect
import io
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import types
import warnings

AHEAD = """
torch torch.cuda torch.distributed torch.distributed.checkpoint torch.distributed.fsdp torch.distributed.tensor
torch.distributed.device_mesh torch.distributed.nn torch.fx torch.func torch.export torch.library
torch._dynamo torch._inductor.compile_fx torch._inductor.lowering torch.utils.data torch.utils.checkpoint
torch.utils.tensorboard torch.utils._debug_mode torch.multiprocessing torch.optim torch.testing
numpy scipy.special scipy.stats scipy.sparse sympy networkx pandas pyarrow.compute pyarrow.dataset datasets
pkg_resources transformers transformers.models
aiohttp fastapi openai openai.types.chat openai.types.responses pydantic requests httpx jinja2 jsonschema zmq msgspec
prometheus_client PIL.Image opentelemetry.trace google.protobuf uvicorn watchfiles cloudpickle yaml omegaconf einops
""".split()
# Prefixes of variables that libraries read at import: the server refuses a process with another value of one.
AT_IMPORT = tuple(
    "OMP_ MKL_ OPENBLAS_ NUMEXPR_ KMP_ TORCH PYTORCH_ PYTHONHASHSEED LD_ MALLOC_ ARROW_ PYDANTIC_ MPLBACKEND HF_ "
    "TRANSFORMERS_".split()
)
# The exceptions: torch and vLLM set some in processes that import them, such as pytest's own; torch.compile and
# torch_npu read the others later.
NOT_AT_IMPORT = (
    *("PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_CACHE_DIR"),
    *("TORCHDYNAMO_DISABLE", "PYTORCH_NPU_ALLOC_CONF"),
)
NEVER = """
verl verl_patches vllm vllm_ascend megatron mindspeed mindspeed_llm ray tensordict torch_npu apex flash_attn
transformer_engine triton
""".split()


def at_import(env):
    return {name: value for name, value in env.items() if name.startswith(AT_IMPORT) and name not in NOT_AT_IMPORT}


def import_ahead():
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # a fork would lack pyarrow's thread
    for name in AHEAD:
        importlib.import_module(name)
    found = sorted({name.partition(".")[0] for name in sys.modules} & set(NEVER))
    threads = len(os.listdir("/proc/self/task"))
    # vLLM asks for the source of each of its 30 configuration classes; inspect would parse the whole file each time.
    inspect.ast = types.SimpleNamespace(**vars(ast) | {"parse": functools.lru_cache(8)(ast.parse)})
    gc.collect()
    gc.freeze()  # so that garbage collection does not copy shared pages
    if found or threads != 1:
        raise SystemExit(f"warm/server.py: expected one thread and nothing of {NEVER}, found {threads}, {found}")


def receive(client):
    head, fds, _, _ = socket.recv_fds(client, 4, 3)
    (size,) = struct.unpack("!I", head)
    text = b""
    while len(text) < size:
        text += client.recv(size - len(text)) or b" " * size  # json refuses a cut text
    return json.loads(text), fds


def serve(path, mine):
    """Answer requests until the parent ends; in a fork, return (request, file descriptors)."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    print("ready", flush=True)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    clients = {}  # socket -> process
    while True:
        ready, _, _ = select.select([listener, wake, *clients], [], [])
        if wake in ready:
            os.read(wake, 4096)
            for client, fork in list(clients.items()):
                process, status = os.waitpid(fork, os.WNOHANG)
                if process:
                    del clients[client]
                    answer(client, status)
                    client.close()
        for client in [each for each in ready if each in clients]:  # readable means closed: it was killed
            with contextlib.suppress(ProcessLookupError):
                os.killpg(clients[client], signal.SIGKILL)
            os.kill(clients[client], signal.SIGKILL)  # it may not lead its process group yet
            os.waitpid(clients.pop(client), 0)
            client.close()
        if listener not in ready:
            continue
        client, _ = listener.accept()
        try:
            asked, fds = receive(client)
        except (OSError, ValueError, struct.error):
            client.close()
            continue
        if asked["executable"] != sys.executable or at_import(asked["env"]) != mine:
            answer(client, 0)
            client.close()
        elif (fork := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for opened in (listener, client, *clients):
                opened.close()
            os.close(wake), os.close(woken)
            return asked, fds
        else:
            clients[client] = fork
            answer(client, fork)
        for fd in fds:
            os.close(fd)


def answer(client, number):
    with contextlib.suppress(OSError):  # the client may have been killed
        client.sendall(struct.pack("!i", number))


def become(asked, fds):
    """Turn this fork into the requested process, up to its first line; return (code, None) or (None, script)."""
    die_with_parent()
    os.setsid()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.stdin = io.TextIOWrapper(open(0, "rb", closefd=False))
    at_once = bool(asked["env"].get("PYTHONUNBUFFERED"))
    sys.stdout.reconfigure(line_buffering=True, write_through=at_once)
    sys.orig_argv = asked["command"]
    sys.path[:] = asked["paths"]
    sys.path_importer_cache.clear()
    sys.warnoptions[:] = asked["warnings"]
    for option in asked["warnings"]:
        warnings.simplefilter(option.partition(":")[0])
    sys.modules["numpy"].random.seed()
    words = iter(asked["command"][1:])
    for word in words:
        if word == "-c":
            code = next(words)
            sys.argv = ["-c", *words]
            sys.path.insert(0, "")
            return code, None
        if word in ("-X", "-W"):
            next(words)
        elif not word.startswith("-"):
            sys.argv = [word, *words]
            sys.path.insert(0, os.path.dirname(os.path.abspath(word)))
            return None, word
    raise SystemExit(f"warm/server.py: neither -c nor a script in {asked['command']}")


def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def run(code, path):
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=__builtins__, __spec__=None)
    if path is not None:
        module.__file__ = path
        with open(path, "rb") as file:
            code = file.read()
    sys.modules["__main__"] = module
    status = 0
    try:
        exec(compile(code, path or "<string>", "exec"), module.__dict__)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)  # a regular exit unloads thousands of shared modules, which takes seconds


if __name__ == "__main__":
    die_with_parent()
    started_with = at_import(os.environ)  # before the imports: libraries set some themselves
    import_ahead()
    run(*become(*serve(sys.argv[1], started_with)))
