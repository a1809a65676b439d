"""A simulated asynchronous accelerator, for tests of device code on machines without a GPU.

    pytest_plugins = ["simdev.plugin"]

    def test_something(sim):                        # in a process of its own, where torch.accelerator is this device
        sim.configure(link=1e9, delay=0.001, seed=3)
        x = torch.ones(3).pin_memory().to("sim", non_blocking=True)
        assert sim.counters()["copies.h2d.pageable"] == 0 and not sim.hazards()

Code under test uses the generic interface only: `torch.accelerator`, `torch.Stream`, `torch.Event`, `pin_memory`,
`non_blocking`, `record_stream`. What it meets is what CUDA would show it:

- **Streams** are worker threads with a queue; ops and copies are asynchronous. An op runs its CPU kernel, so results have the
  CPU's bits, after `torch.manual_seed` too (attention: "eager", since for "sdpa" torch picks other kernels than on the CPU).
  Errors that only a kernel can see come with the next synchronisation, all others at the call. Ops whose sizes depend on data
  make the host wait.
- **Copies** over the link are asynchronous only between the device and pinned memory of the same type, both contiguous.
  `link` is its rate in bytes/s (one number, or two: host to device, device to host; None: as fast as it goes), `latency` is in s.
- **Memory** has a `capacity` in bytes, `torch.OutOfMemoryError` beyond it, and peak counters. A freed block may be used again
  at once by the stream that allocated it; `record_stream` delays that. The host crashes with a message if it touches device
  memory. Pinned memory is rounded up to powers of two, and `pinned_capacity` limits it; `torch.sim.host_register(address,
  bytes)` pins memory that is there already.
- **Time**: `op_time` is the least time of an op in s, or a dict of names ("aten::mm") with "" for the others. `delay` lets every
  task begin up to so many seconds late, at random by `seed`.

**Hazards** are found by vector clocks that are kept when work is issued, so they do not depend on timing:

- `read before ready`, `overwritten while read`, `written twice`: two accesses that no event, stream or host wait orders.
- `staging reused`: the host changed pinned memory before it knew that the copy out of it was over.
- `missing record_stream`: a block was freed while another stream might use it.
- `host too early`: the host touched pinned memory before it knew that the copy into it was over.

`counters()`: `syncs` is how often the thread that reset the device had to wait for it; `sync.event`, `.stream`, `.device`,
`.copy`, `.item`, `.nonzero`, `.memory`, ... say why, and `aside.event`, ... are the waits of other threads. `copies.` and
`bytes.` of `h2d.pinned`, `h2d.pageable`, `d2h.pinned`, `d2h.pageable`, `d2d`; `ops`; `query`; `memory.allocated`, `.peak`,
`.reserved`, `.pinned`, `.refused`. `trace()` is the timeline. The fixture `sim` fails a test that leaves hazards it has not
looked at.

What it does not know: several devices, graphs, priorities. One clock for all threads of the host: what one of them has waited for
counts as known to the others. Strided ranges: they reach from the first to the last byte. A wait after a block was freed does not
excuse the missing `record_stream`, even if nothing used the block in between.

Where: `core.h` settings and counters, `hazards.h` the checker, `streams.h` workers and events, `memory.h` allocators, `device.h`
torch's guard and hooks, `ops.h` tensors, copies and ops, `plugin.py` the fixture. Built on first use into `build/` here (or
`EXPERTFLOW_SIMDEV_BUILD`), again when a source, torch or Python changes; `SIMDEV_VERBOSE=1` shows the compiler.
"""
import atexit
import collections
import hashlib
import importlib.util
import os
import shutil
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
NAME = "sim"
_ARENA = 32 << 30   # bytes of addresses, not of memory
_core: Any = None
_settings: dict[str, Any] = {}
DEFAULTS: dict[str, Any] = {"capacity": 2 << 30, "pinned_capacity": None, "link": None, "latency": 0.0, "op_time": 0.0,
                            "delay": 0.0, "seed": 0}


def available() -> tuple[bool, str]:
    "Whether the device can be built here, and if not, why."
    if not sys.platform.startswith("linux"): return False, "the simulated device needs Linux"
    if shutil.which(os.environ.get("CXX", "c++")) is None: return False, "the simulated device needs a C++ compiler (g++)"
    if not _ninja(): return False, "the simulated device needs ninja to be built"
    import torch
    if not hasattr(torch.accelerator, "get_memory_info"): return False, "the simulated device needs a newer torch than 2.9"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.exists(): return False, "the simulated device needs Python.h to be built"
    return True, ""


def _ninja() -> bool:
    "ninja from a package lies beside the interpreter, which need not be on the path."
    path, beside = os.environ.get("PATH", ""), str(Path(sys.executable).parent)
    if beside not in path.split(os.pathsep): os.environ["PATH"] = path + os.pathsep + beside
    return shutil.which("ninja") is not None


def build() -> Path:
    "The compiled device: made anew if its sources, torch or Python have changed, by one of the processes that ask for it."
    import torch
    from filelock import FileLock
    sources = sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h")])
    parts = [*(p.read_bytes() for p in sources), f"{torch.__version__} {sys.version}".encode()]
    key = hashlib.sha256(b"".join(parts)).hexdigest()[:16]
    folder = Path(os.environ.get("EXPERTFLOW_SIMDEV_BUILD") or HERE / "build") / key
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / "complete"
    with FileLock(folder.parent / f"{key}.lock"):
        if not done.exists():
            from torch.utils.cpp_extension import load
            (folder / "lock").unlink(missing_ok=True)   # torch's own, left by a build that was killed
            load("simdev_core", [str(HERE / "simdev.cpp")], extra_cflags=["-O1"], build_directory=str(folder),
                 is_python_module=False, verbose=bool(os.environ.get("SIMDEV_VERBOSE")))
            done.touch()
    return folder / "simdev_core.so"


def load() -> Any:
    "Builds and starts the device in this process, once. From then on it is `torch.accelerator` here."
    global _core
    if _core is not None: return _core
    import torch
    spec = importlib.util.spec_from_file_location("simdev_core", build())
    assert spec and spec.loader
    _core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(_core)
    torch.set_num_threads(torch.get_num_threads())  # here, not by several workers of a fork at once
    torch.utils.rename_privateuse1_backend(NAME)
    m: Any = types.ModuleType(f"torch.{NAME}")
    m.is_available, m.is_initialized, m._is_in_bad_fork = _core.running, _core.running, _core.forked
    m.device_count, m.current_device, m.set_device = lambda: 1, lambda: 0, lambda d: None
    m.manual_seed = m.manual_seed_all = _core.seed
    m.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    m.host_register, m.host_unregister = _core.host_register, _core.host_unregister
    torch._register_device_module(NAME, m)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _core.start(_ARENA)
    atexit.register(_core.shut_down)
    configure(**DEFAULTS)
    return _core


def pretend_cuda() -> None:
    "For FakeTensorMode, which can have tensors on a CUDA device that is not there, but not index them in a build without CUDA."
    load().pretend_cuda()


def configure(**changes: Any) -> None:
    "Changes settings; what is not named stays as it is."
    if unknown := set(changes) - set(DEFAULTS): raise TypeError(f"no such settings: {', '.join(sorted(unknown))}")
    core = load()
    _settings.update(changes)
    s, link = _settings, _settings["link"]
    h2d, d2h = link if isinstance(link, tuple) else (link, link)
    op_time = s["op_time"] if isinstance(s["op_time"], dict) else {"": s["op_time"]}
    pinned = 2**64 - 1 if s["pinned_capacity"] is None else s["pinned_capacity"]
    core.configure(s["capacity"], pinned, h2d or 0, d2h or 0, s["latency"], op_time, s["delay"], s["seed"])


def reset() -> None:
    "Waits until the device is idle; then settings, counters, hazards, timeline and peak are as at the start."
    load().reset()
    configure(**DEFAULTS)


def unseen_error() -> str:
    "Waits until the device is idle; the error of a worker that no synchronisation has reported yet, or ''."
    error: str = load().unseen_error()
    return error


class Hazard(NamedTuple):
    "Two accesses to the same memory that nothing orders."
    kind: str
    first: str          # the op, or "copy h2d", ...
    first_stream: int   # 0: the default stream; -1: the host
    second: str
    second_stream: int
    range: str          # "device[lo:hi]", "pinned[lo:hi]"

    def __str__(self) -> str:
        where = ["the host" if s < 0 else f"stream {s}" for s in (self.first_stream, self.second_stream)]
        return f"{self.kind}: {self.first} on {where[0]}, then {self.second} on {where[1]}, {self.range}"


def hazards(clear: bool = True) -> list[Hazard]:
    "What the checker has found."
    return [Hazard(*h) for h in load().hazards(clear)]


def counters() -> collections.Counter[str]:
    "Counts since the last reset; `syncs` is the sum of all `sync.*`. Missing ones are 0."
    c = collections.Counter(load().counters())
    c["syncs"] = sum(n for k, n in c.items() if k.startswith("sync."))
    return c


class Span(NamedTuple):
    "Something that took time."
    name: str
    kind: str       # op, h2d, d2h, d2d; wait: a stream waited for an event; sync: the host waited
    stream: int     # -1: the host
    start: float    # s since the last reset
    end: float
    bytes: int


def trace() -> list[Span]:
    "What ran when and where, in order of its end."
    return [Span(*s) for s in load().trace()]
