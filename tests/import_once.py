"""Python processes that start with torch, transformers, DeepSpeed and this project imported.

Importing these takes 4 s of processor time, and a launch pays it three times: in the launcher and
in each rank, which adds 1 s to 3 s for what DeepSpeed imports when its engine is made. Here one
process imports them once, and every further process is a fork of it.

    import_once.py serve FD FD         import; then fork for whoever asks on the first socket, until
                                       the other end of the second one is closed
    import_once.py ask PYTHON ...      what the executable PYTHON does, which stands for `python`:
                                       ask at PYTHON.socket, pass on arguments, environment, folder,
                                       limits and open files, forward signals, end as the fork ends.
                                       If this process is killed, the fork is killed too.

The project's own modules are found as imported where a fork looks for them in this repository. Its
packages' __init__ run in each fork, and so does what a fork runs as __main__.

A fork can't undo an import. Where the environment says something else that packages read while they
are imported (HF_HUB_OFFLINE), where another folder of PYTHONPATH has one of them, or for -c,
PYTHON starts a new interpreter instead. With FORKS_ONLY in the environment that is an error, but
for -c: else nobody would notice that all runs became slow.
"""

import array
import json
import os
import resource
import signal
import socket
import struct
import sys

PACKAGES = (
    "torch", "torch.distributed.run", "torch.distributed.fsdp", "torch.distributed.checkpoint",
    "torch._dynamo", "torch.profiler", "transformers", "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.llama.modeling_llama", "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "transformers.tokenization_utils_tokenizers", "transformers.convert_slow_tokenizer",
    "tokenizers", "accelerate", "deepspeed", "deepspeed.pipe",
    "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.module_inject.auto_ep_layer",
    "torch._inductor.compile_fx", "torch.utils.serialization",
    "networkx", "numpy.ma", "psutil", "safetensors.torch", "torch.profiler._cupti_monitor",
)  # fmt: skip
OWN = ("fsdp.train_fsdp", "fsdp_pp.train_fsdp_pp", "pp.pp_train", "zero.train_zero")
READ_BY_IMPORTS = (
    "PYTHON", "OMP_", "MKL_", "TORCH", "PYTORCH", "TRITON_", "HF_", "TRANSFORMERS_", "DS_",
    "LD_",
)  # fmt: skip
# What launchers read, and set for ranks; folders that compiling sets in the process of the tests
NOT_READ = (
    "PYTHON=", "TORCHELASTIC_", "TORCH_NCCL_", "TORCHINDUCTOR_CACHE_DIR=", "TRITON_CACHE_DIR=",
)  # fmt: skip
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# What launch_common.sh sets, and what importing DeepSpeed sets in the process of the tests
ALWAYS = {
    "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONUTF8": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}  # fmt: skip
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


def read_by_imports(environ) -> dict:
    """What the imports depend on. OMP_NUM_THREADS is 1 in the server: where nobody has set it, only
    a launcher runs, and that doesn't compute."""
    found = {k: v for k, v in environ.items() if k.startswith(READ_BY_IMPORTS)}
    found = {k: v for k, v in found.items() if not f"{k}=".startswith(NOT_READ)}
    packages = {name.split(".")[0] for name in PACKAGES}
    shadows = [f for f in folders(environ) if packages & {n.split(".")[0] for n in os.listdir(f)}]
    return {**ALWAYS, **found, "PYTHONPATH": shadows}


def folders(environ) -> list[str]:
    found = environ.get("PYTHONPATH", "").split(os.pathsep)
    return [f for f in dict.fromkeys(found) if os.path.isdir(f)]


# ---------------------------------------------------------------- what stands for `python`


def ask(executable: str, arguments: list[str]) -> None:
    """Run `python ARGUMENTS` as a fork of the server; doesn't return."""
    if "LLM_DEMO_PARENT" in os.environ:  # a rank asks to end with its parent: for it, the server
        from ctypes import CDLL

        CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(f"{executable}.socket")
        imported = json.loads(receive(server))
        plain = arguments[arguments[0] == "-u" :]
        here = read_by_imports(os.environ)
        if imported != here and "FORKS_ONLY" in os.environ and plain[0] != "-c":
            sys.exit(f"no fork: packages were imported with {imported}, not with {here}")
        if imported != here or plain[0] == "-c":
            server.close()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
            os.execv(sys.executable, [sys.executable, *arguments])
        request = {
            "executable": executable,
            "arguments": plain,
            "unbuffered": plain != arguments,
            "environ": dict(os.environ),
            "folder": os.getcwd(),
            "parent": os.getppid(),
            "limits": [resource.getrlimit(which) for which in LIMITS],
            "ignored": [s for s in FORWARDED if signal.getsignal(s) == signal.SIG_IGN],
        }
        send(server, json.dumps(request))
        files = array.array("i", [0, 1, 2])
        server.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
        child = int(receive(server))
        for signum in FORWARDED:
            signal.signal(signum, lambda signum, _frame: os.kill(child, signum))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        code = int(receive(server))
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def send(connection, text: str) -> None:
    data = text.encode()
    connection.sendall(struct.pack("!I", len(data)) + data)


def receive(connection) -> str:
    def exactly(n):
        data = b""
        while len(data) < n:
            part = connection.recv(n - len(data))
            if not part:
                raise EOFError("the other side is gone")
            data += part
        return data

    return exactly(struct.unpack("!I", exactly(4))[0]).decode()


# ---------------------------------------------------------------- the process that is forked


class Kept:
    """Finds modules that were imported before the fork, in the same folders, and gives them back as
    they are. Packages at the top are imported anew."""

    def __init__(self):
        tops = {name.split(".")[0] for name in OWN} | {"llm_demo"}
        names = [name for name in sys.modules if name.split(".")[0] in tops]
        found = {name: sys.modules.pop(name) for name in names}
        self.modules = {name: module for name, module in found.items() if name not in tops}
        self.folders = {name: [*found[name.rpartition(".")[0]].__path__] for name in self.modules}

    def find_spec(self, name, path=None, target=None):
        from importlib.machinery import ModuleSpec

        if name in self.modules and self.folders[name] == [*path]:
            return ModuleSpec(name, self, is_package=hasattr(self.modules[name], "__path__"))
        return None

    def create_module(self, spec):
        module = self.modules[spec.name]
        spec.loader_state = module.__spec__  # which importing replaces
        return module

    def exec_module(self, module):
        module.__spec__ = module.__spec__.loader_state
        module.__loader__ = module.__spec__.loader


def serve(listener: socket.socket, owner: socket.socket) -> dict:
    """Fork for every request until the other end of `owner` is closed; returns in each fork, with
    its request."""
    import contextlib
    import gc
    import importlib
    import inspect
    import selectors
    import threading
    import weakref

    imported = json.dumps(read_by_imports(os.environ))  # before packages set something there
    compiler = importlib.import_module("torch._inductor.config")
    compiler.compile_threads = 1  # else importing PyTorch 2.8's compiler starts a thread
    for name in PACKAGES:
        with contextlib.suppress(ModuleNotFoundError):  # another version lacks it
            importlib.import_module(name)
    for name in OWN:
        importlib.import_module(name)
    with contextlib.suppress(ImportError):  # another version of transformers has no such table
        conversions = importlib.import_module("transformers.conversion_mapping")
        conversions.get_checkpoint_conversion_mapping("llama")  # compiles 900 expressions
    sys.meta_path.insert(0, Kept())
    assert threading.active_count() == 1, threading.enumerate()
    for finalizer in weakref.finalize._registry:
        finalizer.atexit = False  # of the imports: each fork would take apart torch's libraries
    inspect.getmodule(serve)  # its table of files, which torch.library asks for every operator
    gc.collect()
    gc.freeze()  # forks share these objects as long as nobody writes to them
    gc.set_threshold(50_000, 20, 10)  # many short runs: collections took a tenth of their time

    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(owner, selectors.EVENT_READ)
    forks = {}  # connection -> (pid, pidfd), and pidfd -> connection
    while True:
        for key, _ in selector.select():
            ready = key.fileobj
            if ready is owner:
                for pid, _ in (forks[c] for c in forks if not isinstance(c, int)):
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            elif ready is listener:
                connection, _ = listener.accept()
                try:
                    send(connection, imported)
                    request = json.loads(receive(connection))
                    _, control, *_ = connection.recvmsg(1, socket.CMSG_SPACE(3 * 4))
                except (EOFError, OSError):  # it starts an interpreter of its own
                    connection.close()
                    continue
                files = array.array("i", control[0][2])
                pid = os.fork()
                if pid == 0:
                    for other in (listener, owner, connection, selector):
                        other.close()
                    for other in forks:
                        os.close(other) if isinstance(other, int) else other.close()
                    for number, file in enumerate(files):
                        os.dup2(file, number)
                        os.close(file)
                    return request
                for file in files:
                    os.close(file)
                pidfd = os.pidfd_open(pid)
                forks[connection], forks[pidfd] = (pid, pidfd), connection
                selector.register(connection, selectors.EVENT_READ)
                selector.register(pidfd, selectors.EVENT_READ)
                send(connection, str(pid))
            elif ready in forks:
                # a fork has ended, or the process that stands for it has been killed
                connection = forks[ready] if isinstance(ready, int) else ready
                pid, pidfd = forks[connection]
                if ready is connection:
                    os.kill(pid, signal.SIGKILL)
                ended, status = os.waitpid(pid, 0 if ready is connection else os.WNOHANG)
                if not ended:  # an event of an earlier fork, whose pidfd had the same number
                    continue
                del forks[connection], forks[pidfd]
                code = os.waitstatus_to_exitcode(status)
                selector.unregister(connection)
                selector.unregister(pidfd)
                try:
                    send(connection, str(code))
                except OSError:
                    pass
                connection.close()
                os.close(pidfd)


def become(request: dict) -> tuple:
    """Make this fork what the request describes; returns what to run: (code, its namespace)."""
    os.setpgid(0, 0)
    os.chdir(request["folder"])
    sys.path[1 : 1 + len(folders(os.environ))] = folders(request["environ"])
    os.environ.clear()
    os.environ.update(request["environ"])
    for which, limits in zip(LIMITS, request["limits"], strict=True):
        resource.setrlimit(which, limits)
    for signum in FORWARDED:
        if signum in request["ignored"]:
            signal.signal(signum, signal.SIG_IGN)
        elif signal.getsignal(signum) == signal.SIG_IGN:  # the tests run under nohup
            signal.signal(signum, signal.SIG_DFL)
    me, real = os.getpid(), os.getppid  # a fork of this one has a parent of its own
    os.getppid = lambda: request["parent"] if os.getpid() == me else real()
    sys.executable = request["executable"]
    if sys.dont_write_bytecode:  # PYTHONDONTWRITEBYTECODE: each fork would compile the same source
        sys.pycache_prefix = os.path.join(os.path.dirname(sys.executable), "bytecode")
        sys.dont_write_bytecode = False
    if request["unbuffered"]:
        sys.stdout.reconfigure(write_through=True)
    first, *rest = request["arguments"]
    main = type(sys)("__main__")
    main.__builtins__ = __builtins__
    sys.modules["__main__"] = main
    if first == "-m":
        import runpy

        sys.path[0] = os.getcwd()
        sys.argv = rest
        for name in (rest[0], f"{rest[0]}.__main__"):
            sys.meta_path[0].modules.pop(name, None)
        _, spec, code = runpy._get_module_details(rest[0])
        sys.argv = [spec.origin, *rest[1:]]
        main.__file__, main.__spec__, main.__package__ = spec.origin, spec, spec.parent
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(first))
        sys.argv = [first, *rest]
        main.__file__ = first
        with open(first, "rb") as file:
            code = compile(file.read(), first, "exec")
    return code, vars(main)


def end(code, namespace) -> None:
    """Run code and end as an interpreter does, but for clearing away what was imported: 0.3 s."""
    import atexit
    import threading

    status = 0
    try:
        exec(code, namespace)
    except SystemExit as e:
        status = e.code
        if not isinstance(status, int | None):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        ask(sys.argv[2], sys.argv[3:])
    sockets = (socket.socket(fileno=int(number)) for number in sys.argv[2:])
    end(*become(serve(*sockets)))
