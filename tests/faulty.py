"Faults made to order: a disk that fails, Ctrl-C before any line; and what must not be left behind."

import errno
import linecache
import os
import threading

def open_files(path):
    "Descriptors of this process that are open on files below `path`."
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return [f for f in found if f.startswith(str(path))]


class Interrupt:
    "A trace function that raises KeyboardInterrupt before the n-th line of some modules that this thread executes."

    def __init__(self, n, *modules):
        self.left, self.files = n, {m.__file__ for m in modules}

    def __call__(self, frame, event, arg):
        return self.line if frame.f_code.co_filename in self.files else None

    def line(self, frame, event, arg):
        # a real signal is seen after calls only: never between the end of a with block and its __exit__, nor before "try"
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        if event == "line" and not text.startswith(("with ", "try:")):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self.line


class Disk:
    "`os.preadv` with faults; knows which expert is being read."

    def __init__(self, flow, monkeypatch):
        self.real, self.mine, self.rule = os.preadv, threading.local(), None
        self.log = []
        if flow is not None:
            self.watch(flow.runtime.store)
        monkeypatch.setattr(os, "preadv", self)

    def watch(self, store):
        read = store.read_into

        def read_into(layer, expert, buf):
            self.mine.at = (layer, expert)
            self.log.append(self.mine.at)
            return read(layer, expert, buf)

        store.read_into = read_into

    def __call__(self, fd, buffers, offset):
        if self.rule is not None:
            self.rule(getattr(self.mine, "at", None))
        return self.real(fd, buffers, offset)

    def break_at(self, *experts, code=errno.EIO, times=10**9):
        left = [times]

        def rule(at):
            if at in experts and left[0] > 0:
                left[0] -= 1
                raise OSError(code, os.strerror(code))

        self.rule = rule
