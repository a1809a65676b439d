"Faults made to order: a disk that fails, Ctrl-C before any line; and what must not be left behind."

import errno
import linecache
import os
import threading

from expertflow.cache import balance

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

    def break_when_waited_for(self, flow, monkeypatch, layer, expert, times=1):
        "Reads of this expert fail, but not before its load is waited for."
        rt, waited, left = flow.runtime, threading.Event(), [times]
        wait = rt.executor.wait

        def waits(slot):
            if slot == rt.cache.slot_of[layer][expert]:
                waited.set()
            wait(slot)

        def rule(at):
            if at == (layer, expert) and left[0] > 0:
                assert waited.wait(60)
                left[0] -= 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(rt.executor, "wait", waits)
        self.rule = rule


def books_of_a_retry(flow, disk, layer, expert):
    "After a prefetch has failed once, and the step that needed it has read the expert again."
    rt, count, moved = flow.runtime, flow.runtime.cache.count, flow.runtime.executor.moved
    assert disk.log.count((layer, expert)) == 2
    assert count.prefetched == count.late == moved.prefetch == 1 and moved.demand == count.loads - 1 and balance(rt.cache) == 0
    assert rt.traffic.bytes_loaded == (count.loads - 1) * rt.layouts[layer].nbytes
    assert moved.bytes_read == sum(rt.store.disk_bytes(*key) for key in disk.log) - rt.store.disk_bytes(layer, expert)
