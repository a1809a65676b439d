"A model three times as large as the memory that the kernel allows the process, under a real control group."

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

CHILD = """
import json, os, sys
open(sys.argv[1], "w").write(str(os.getpid()))  # before anything is allocated
import torch
torch.set_num_threads(1)
from expertflow.flow import ExpertFlow
from expertflow.hardware import memory_limit
settings = json.loads(sys.argv[3])
prompt = settings.pop("prompt", 24)
with ExpertFlow.from_pretrained(sys.argv[2], **{"context": 128, **settings}) as flow:
    ids = torch.arange(prompt)[None] % 4000 + 3
    out = flow.model.generate(ids, max_new_tokens=12, do_sample=False)
    print(json.dumps({"tokens": out[0, prompt:].tolist(), "limit": memory_limit(), **flow.report().as_dict()}))
"""


@pytest.fixture
def group():
    "A function that makes a control group with a limit and returns (file to join it by, folder)."
    made = []

    def make(limit):
        v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
        name = f"expertflow-test-{uuid.uuid4().hex[:8]}"
        try:
            if (v1 / "memory.limit_in_bytes").exists():
                folder, knob = v1 / name, "memory.limit_in_bytes"
            elif "memory" in (v2 / "cgroup.subtree_control").read_text():
                folder, knob = v2 / name, "memory.max"
            else:
                pytest.skip("no memory control group on this machine")
            folder.mkdir()
            made.append(folder)
            (folder / knob).write_text(str(limit))
        except OSError as e:
            pytest.skip(f"control groups cannot be made here: {e}")
        return folder / "cgroup.procs", folder

    yield make
    for folder in made:
        folder.rmdir()


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    "1.8 GB of fp32 weights or more, most of them routed experts: a third has to hold torch itself, whose CUDA builds are large."
    from expertflow.testing import write_random_olmoe

    ask = "import torch; from expertflow.flow import look_around; print(look_around(torch.device('cpu'), None, 'float32').system)"
    system = int(subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout)
    layers = max(6, -(-3 * (system + 250_000_000) // 302_000_000))
    path = tmp_path_factory.mktemp("big") / "olmoe"
    write_random_olmoe(path, n_layers=layers, hidden=1024, intermediate=384, n_experts=64, vocab=8192, dtype="float32")
    yield path
    for f in path.iterdir():
        f.unlink()


def test_long_prompts_stay_inside_the_plan(tmp_path):
    "Prompts as long as the context allows, in bf16 and fp32: the process never grows beyond the budget."
    from expertflow.testing import write_random_olmoe

    for dtype in ("bfloat16", "float32"):
        size = {"n_layers": 4, "hidden": 256, "intermediate": 128, "n_experts": 32, "vocab": 4096, "heads": 4}
        path = write_random_olmoe(tmp_path / dtype, dtype=dtype, **size)
        for context in (128, 1024):
            got = run("/dev/null", path, gpu_memory_budget="50%", context=context, prompt=context - 12)
            assert got["peak"] <= got["memory"]["device"]["capacity"], (dtype, context)


def test_many_experts_of_many_rows_stay_inside_the_plan():
    "256 experts, each with another number of rows in bf16: as many kernels are compiled, and they must not pile up."
    from expertflow.flow import find_checkpoint

    got = run("/dev/null", find_checkpoint("tiny-moe"), gpu_memory_budget="50%", context=1024, prompt=1000)
    assert got["peak"] <= got["memory"]["device"]["capacity"]


def run(join, path, **settings):
    argv = [sys.executable, "-W", "ignore", "-c", CHILD, str(join), str(path), json.dumps(settings)]
    out = subprocess.run(argv, capture_output=True, text=True, timeout=500, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert out.returncode == 0, f"killed or failed ({out.returncode}): {out.stderr[-2000:]}"
    return json.loads(out.stdout.strip().splitlines()[-1])


def test_a_third_of_its_size(group, big):
    "The budget is the limit; the measured peak stays below it, and the tokens are those of a run with plenty of memory."
    size = sum(f.stat().st_size for f in big.glob("*.safetensors"))
    limit = size // 3 // 4096 * 4096
    join, _ = group(limit)
    got = run(join, big, gpu_memory_budget=f"{limit}B")
    assert size > 500_000_000 and got["limit"] == limit
    assert got["peak"] <= limit == got["memory"]["device"]["capacity"]
    assert got["plan"]["slots"] < got["plan"]["total_experts"] // 2 and got["cache"]["misses"] > 0
    plenty = run("/dev/null", big, gpu_memory_budget="100%")
    assert plenty["plan"]["verdict"] == "fits resident" and plenty["tokens"] == got["tokens"]


def test_auto_reads_the_limit(group, big):
    "With no budget given the plan stays inside what the control group allows."
    limit = sum(f.stat().st_size for f in big.glob("*.safetensors")) // 2
    join, _ = group(limit)
    got = run(join, big)
    assert got["memory"]["device"]["capacity"] <= limit and got["peak"] <= limit
