"Memory limits of machines that we do not have, from folders that look like theirs; and of this one, in a real control group."
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expertflow import hardware
from expertflow.config import BudgetError, ConfigError
from expertflow.hardware import (
    cores,
    device_memory,
    environment,
    memory_available,
    memory_limit,
    memory_limits,
    peak_rss,
    pick_device,
    reset_peak_rss,
    rss,
)

GB = 10**9
NONE_V1 = 9223372036854771712
V1_MOUNTS = ("36 32 0:31 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:1 - cgroup cgroup rw,cpu,cpuacct\n"
             "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:2 - cgroup cgroup rw,memory\n"
             "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n")
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev - cgroup2 cgroup2 rw,nsdelegate\n"


def fake(root: Path, files: dict[str, object], total: int = 64 * GB, available: int = 40 * GB) -> Path:
    "A folder that looks like the root of a machine."
    meminfo = f"MemTotal:       {total // 1024} kB\nMemAvailable:   {available // 1024} kB\nHugePages_Total:       0\n"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        p = root / name
        p.parent.mkdir(parents=True, exist_ok=True)
        p.write_text(f"{text}\n")
    return root


def v2(folder: str, limit, used=0, idle=0, **more) -> dict[str, object]:
    base = f"sys/fs/cgroup/{folder}/memory"
    return {f"{base}.max": limit, f"{base}.current": used, f"{base}.stat": f"anon 1\nfile 2\ninactive_file {idle}\nactive_file 7",
            **{f"{base}.{k}": v for k, v in more.items()}}


def v1(folder: str, limit, used=0, idle=0, hierarchical=NONE_V1) -> dict[str, object]:
    base = f"sys/fs/cgroup/memory/{folder}/memory"
    stat = f"inactive_file 1\nhierarchical_memory_limit {hierarchical}\ntotal_inactive_file {idle}\ntotal_active_file 9"
    return {f"{base}.limit_in_bytes": limit, f"{base}.usage_in_bytes": used, f"{base}.stat": stat}


def us(n: int) -> int: return n // 1024 * 1024     # meminfo counts kB


def test_no_control_groups_at_all(tmp_path):
    fake(tmp_path, {})
    assert (memory_limit(tmp_path), memory_available(tmp_path)) == (us(64 * GB), us(40 * GB))
    assert [x.source for x in memory_limits(tmp_path)] == ["this machine"]


@pytest.mark.parametrize("unlimited", ["max", NONE_V1, "", "-1", "nonsense"])
def test_groups_without_limit(tmp_path, unlimited):
    fake(tmp_path, {"proc/self/cgroup": "0::/a", "proc/self/mountinfo": V2_MOUNT, **v2("a", unlimited, 5 * GB)})
    assert memory_limit(tmp_path) == us(64 * GB)


def test_v2_the_tightest_on_the_path_wins(tmp_path):
    fake(tmp_path, {"proc/self/cgroup": "0::/a/b/c", "proc/self/mountinfo": V2_MOUNT, **v2("a", 8 * GB, 7 * GB),
                    **v2("a/b", "max"), **v2("a/b/c", 20 * GB, 3 * GB), **v2("a/other", 1 * GB), **v2("a/b/c/below", 1 * GB)})
    assert (memory_limit(tmp_path), memory_available(tmp_path)) == (8 * GB, 1 * GB)
    assert memory_limits(tmp_path)[0].source == "control group /a (v2)"


def test_limit_and_headroom_may_come_from_different_places(tmp_path):
    fake(tmp_path, {"proc/self/cgroup": "0::/a", "proc/self/mountinfo": V2_MOUNT, **v2("a", 16 * GB, 1 * GB)}, available=2 * GB)
    assert (memory_limit(tmp_path), memory_available(tmp_path)) == (16 * GB, us(2 * GB))


def test_cached_file_pages_can_be_had(tmp_path):
    fake(tmp_path, {"proc/self/cgroup": "0::/a", "proc/self/mountinfo": V2_MOUNT, **v2("a", 4 * GB, 4 * GB, idle=3 * GB)})
    assert memory_available(tmp_path) == 3 * GB


def test_overdrawn_group_has_nothing_left_and_not_less(tmp_path):
    fake(tmp_path, {"proc/self/cgroup": "0::/a", "proc/self/mountinfo": V2_MOUNT, **v2("a", 4 * GB, 5 * GB)})
    assert memory_available(tmp_path) == 0
    fake(tmp_path, v2("a", 4 * GB, 1 * GB, idle=9 * GB))        # read at different moments
    assert memory_available(tmp_path) == 4 * GB


def test_memory_high_is_a_limit_too(tmp_path):
    fake(tmp_path, {"proc/self/cgroup": "0::/a", "proc/self/mountinfo": V2_MOUNT, **v2("a", 8 * GB, high=6 * GB)})
    assert memory_limit(tmp_path) == 6 * GB


def test_limit_above_the_machine_does_not_count(tmp_path):
    fake(tmp_path, {"proc/self/cgroup": "0::/a", "proc/self/mountinfo": V2_MOUNT, **v2("a", 100 * GB)})
    assert memory_limit(tmp_path) == us(64 * GB)


def test_v1(tmp_path):
    fake(tmp_path, {"proc/self/cgroup": "5:devices:/x\n4:memory:/a/b\n2:cpu,cpuacct:/\n0::/\n", "proc/self/mountinfo": V1_MOUNTS,
                    **v1("", NONE_V1), **v1("a", 6 * GB, 5 * GB, idle=2 * GB), **v1("a/b", NONE_V1, 1 * GB, hierarchical=6 * GB)})
    assert (memory_limit(tmp_path), memory_available(tmp_path)) == (6 * GB, 3 * GB)


def test_v1_limit_above_what_is_visible(tmp_path):
    "In a container the folders above our own are not mounted, but the kernel tells their smallest limit."
    mounts = "35 31 0:32 /docker/ab /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    fake(tmp_path, {"proc/self/cgroup": "4:memory:/docker/ab", "proc/self/mountinfo": mounts,
                    **v1("", NONE_V1, GB, hierarchical=3 * GB)})
    assert (memory_limit(tmp_path), memory_available(tmp_path)) == (3 * GB, 2 * GB)
    assert memory_limits(tmp_path)[0].source == "control group /docker/ab (v1)"


def test_both_generations_at_once(tmp_path):
    fake(tmp_path, {"proc/self/cgroup": "4:memory:/a\n0::/u", "proc/self/mountinfo": V1_MOUNTS, **v1("a", 6 * GB),
                    "sys/fs/cgroup/unified/u/memory.max": 5 * GB})
    assert memory_limit(tmp_path) == 5 * GB


@pytest.mark.parametrize("path", ["/../..", "/../sibling", "/gone/away (deleted)", "/elsewhere"])
def test_group_of_another_namespace_or_gone(tmp_path, path):
    mounts = V2_MOUNT if "gone" in path else V2_MOUNT.replace(" / /sys", " /pod /sys")
    fake(tmp_path, {"proc/self/cgroup": f"0::{path}", "proc/self/mountinfo": mounts, "sys/fs/cgroup/memory.max": 2 * GB})
    assert memory_limit(tmp_path) == 2 * GB


def test_a_branch_is_a_folder_and_not_a_beginning(tmp_path):
    "/pod2 is not below /pod."
    mounts = V2_MOUNT.replace(" / /sys", " /pod /sys")
    fake(tmp_path, {"proc/self/cgroup": "0::/pod2/x", "proc/self/mountinfo": mounts, **v2("2/x", GB)})
    assert memory_limit(tmp_path) == us(64 * GB)


def test_without_mountinfo_the_usual_places(tmp_path):
    fake(tmp_path, {"proc/self/cgroup": "4:memory:/a\n0::/b", **v1("a", 6 * GB), **v2("b", 5 * GB)})
    assert memory_limit(tmp_path) == 5 * GB


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(st.text(alphabet="0:/,ab\n .-\x00é", max_size=60),
       st.text(alphabet="0 /-cgroup2\\134\n", max_size=80), st.text(max_size=20))
def test_garbage_is_survived(tmp_path, groups, mounts, limit):
    fake(tmp_path, {"sys/fs/cgroup/memory.max": "max"})
    for name, text in {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts, "sys/fs/cgroup/memory.max": limit}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert 0 <= memory_available(tmp_path) <= memory_limit(tmp_path) <= us(64 * GB) and cores(tmp_path) >= 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 80), st.integers(0, 80), st.integers(0, 80)), min_size=1, max_size=4))
def test_any_tree(tmp_path, levels):
    files, path = {"proc/self/mountinfo": V2_MOUNT}, ""
    for n, (limit, used, idle) in enumerate(levels):
        path += f"/g{n}"
        files |= v2(path[1:], limit * GB, used * GB, min(used, idle) * GB)
    fake(tmp_path, files | {"proc/self/cgroup": f"0::{path}"})
    assert memory_limit(tmp_path) == min(us(64 * GB), *(x * GB for x, _, _ in levels))
    left = [max(0, min(x, x - u + min(u, i))) * GB for x, u, i in levels]
    assert memory_available(tmp_path) == min(us(40 * GB), *left)


@pytest.mark.parametrize(("quota", "n"), [("max 100000", 4), ("150000 100000", 2), ("50000 100000", 1), ("", 4), ("1 0", 4)])
def test_cores(tmp_path, monkeypatch, quota, n):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    fake(tmp_path, {"proc/self/cgroup": "0::/a", "proc/self/mountinfo": V2_MOUNT, "sys/fs/cgroup/a/cpu.max": quota})
    assert cores(tmp_path) == n
    q, _, p = quota.partition(" ")
    base = "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs"
    fake(tmp_path, {"proc/self/cgroup": "2:cpu,cpuacct:/a\n0::/", "proc/self/mountinfo": V1_MOUNTS,
                    f"{base}_quota_us": q.replace("max", "-1"), f"{base}_period_us": p})
    assert cores(tmp_path) == n


def test_other_systems_ask_psutil(tmp_path, monkeypatch):
    "macOS and Windows have no /proc."
    pytest.importorskip("psutil")
    here = memory_limits(tmp_path)      # an empty folder: no /proc
    assert len(here) == 1 and 0 < here[0].free <= here[0].total
    monkeypatch.setattr(hardware, "_status", lambda _: None)
    assert abs(rss() - hardware._table(Path("/proc/self/status").read_text()).get("VmRSS", rss())) < 64 * 2**20
    assert peak_rss() >= rss() * 0.9


def test_peak_follows_what_is_taken():
    assert 0 < rss() <= peak_rss() + 2**20
    reset_peak_rss()
    block = bytearray(100 * 2**20)
    high = peak_rss()
    del block
    assert peak_rss() >= high - 2**20
    if reset_peak_rss(): assert peak_rss() < high - 50 * 2**20


def test_limit_in_a_real_control_group():
    "The kernel's own word: a process in a group of 700 MB sees 700 MB, and what it fills is gone from the headroom."
    mine = [(v, f) for v, _, f in hardware._groups(Path("/"), "memory") if f.is_dir()]
    if not mine: pytest.skip("no memory control groups here")
    version, parent = mine[0]
    group, limit = parent / f"expertflow-test-{os.getpid()}", 700 * 10**6 // 4096 * 4096
    code = ("import json, os, sys; from pathlib import Path; g = Path(sys.argv[1]); "
            "(g / 'cgroup.procs').write_text(str(os.getpid()));"
            "from expertflow.hardware import *; a = memory_available(); b = bytearray(200 * 2**20);"
            "print(json.dumps([memory_limit(), memory_limits()[0].source, a, memory_available()]))")
    try:
        group.mkdir()
        (group / ("memory.max" if version == 2 else "memory.limit_in_bytes")).write_text(str(limit))
    except OSError as e:
        if group.is_dir(): group.rmdir()
        pytest.skip(f"control groups cannot be made here: {e.strerror}")
    try: out = subprocess.run([sys.executable, "-c", code, str(group)], capture_output=True, text=True, check=True, timeout=60)
    finally: group.rmdir()
    total, source, before, after = json.loads(out.stdout)
    assert total == limit and group.name in source
    assert after < before - 150 * 2**20 and before <= limit


# devices

class FakeAccelerator(SimpleNamespace):
    def __init__(self, kind: str | None, count: int = 2):
        import torch
        super().__init__(is_available=lambda: kind is not None, current_accelerator=lambda: torch.device(kind) if kind else None,
                         device_count=lambda: count, current_device_index=lambda: 1)


def test_pick_device_with_an_accelerator(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch, "accelerator", FakeAccelerator("cuda"))
    assert pick_device() == pick_device("cuda") == torch.device("cuda", 1)
    assert pick_device("cuda:0") == torch.device("cuda", 0) and pick_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r'only 2 here, counted from 0; use "cuda:1"'): pick_device("cuda:2")
    with pytest.raises(ConfigError, match="there is cuda"): pick_device("xpu")


def test_pick_device_without(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch, "accelerator", FakeAccelerator(None))
    assert pick_device() == torch.device("cpu")
    with pytest.raises(ConfigError, match="there is no accelerator"): pick_device("cuda")
    with pytest.raises(ConfigError, match="torch knows no such device"): pick_device("warp drive")


def test_device_memory_asks_torch_and_else_the_user(monkeypatch):
    torch = pytest.importorskip("torch")
    acc = FakeAccelerator("cuda")
    monkeypatch.setattr(torch, "accelerator", acc)
    acc.get_memory_info = lambda d: (3 * GB, 8 * GB)
    assert device_memory(torch.device("cuda", 0)) == (3 * GB, 8 * GB)

    def silent(d): raise NotImplementedError
    acc.get_memory_info = silent
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda d: (1 * GB, 2 * GB))
    assert device_memory(torch.device("cuda", 0)) == (1 * GB, 2 * GB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", silent)
    with pytest.raises(BudgetError, match=r"cuda:0: .* give gpu_memory_budget"): device_memory(torch.device("cuda", 0))


@pytest.mark.gpu
def test_real_accelerator():
    import torch
    d = pick_device()
    free, total = device_memory(d)
    assert d.index is not None and 0 < free <= total
    assert environment()["device_memory"] == total
    assert torch.empty(1, device=d).device == d


def test_environment_says_what_binds(tmp_path):
    fake(tmp_path, {"proc/self/cgroup": "0::/a", "proc/self/mountinfo": V2_MOUNT, **v2("a", 8 * GB)})
    env = environment(tmp_path)
    assert (env["memory"], env["memory_limited_by"]) == (8 * GB, "control group /a (v2)")
    assert "8.00 GB" in str(env) and str(env["python"]) in str(env)
    json.dumps(env)


def test_needs_no_torch():
    code = ("import sys; sys.modules.update(torch=None, transformers=None);"
            "import expertflow.hardware as h; print(h.environment())")
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "torch is not installed" in done.stdout
