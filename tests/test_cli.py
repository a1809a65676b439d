"""The command line: output, errors and exit status; where it matters in a process of its own, else through its entry point."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from expertflow.cli import main
from expertflow.testing import write_checkpoint

ENTRY = [sys.executable, "-c", "import sys; from expertflow.cli import main; sys.exit(main())"]
PROMPT = "The quick brown fox"


def start(*args, env=None, repo=None):
    env = {**os.environ, "PYTHONPATH": str(repo), "OMP_NUM_THREADS": "1", **(env or {})}
    return subprocess.Popen(
        [*ENTRY, *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd="/"
    )


@pytest.fixture
def process(repo):
    "Runs a command in a process of its own; (exit status, stdout, stderr)."

    def go(*args, **kw):
        p = start(*args, repo=repo, **kw)
        out, err = p.communicate(timeout=120)
        return p.returncode, out, err

    return go


@pytest.fixture
def run(capsys):
    "Runs a command here, which saves importing torch; (exit status, stdout, stderr)."

    def go(*args):
        capsys.readouterr()
        try:
            code = main([str(a) for a in args])
        except SystemExit as e:  # argparse
            code = e.code
        return code, *capsys.readouterr()

    return go


@pytest.fixture
def fails(run):
    "Runs a command that must fail with exit status 2 and one line, which is returned."

    def go(*args):
        code, out, err = run(*args)
        assert code == 2 and not out and "Traceback" not in err, err
        assert err.startswith("expertflow: error: ") and err.count("\n") == 1, err
        return err

    return go


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint("olmoe", tmp_path_factory.mktemp("olmoe"), tokenizer=True)


def test_generate_text(process, path):
    kw = ("--model", path, "--context", 128, "--max-new-tokens", 8)
    code, out, err = process("generate", PROMPT, *kw)
    assert code == 0 and out.strip() and not err, err
    assert process("generate", PROMPT, *kw, "--gpu-memory", "25%")[1] == out  # the budget does not change the text
    code, out, err = process("generate", PROMPT, *kw, "--report", "--set", "eviction_policy=lru")
    assert code == 0 and not err
    for word in ("tokens/s", "hits", "traffic", "peak", "slots", "eviction_policy=lru"):
        assert word in out


def test_generate_json(run, path):
    kw = ("--model", path, "--context", 128, "--max-new-tokens", 8, "--json")
    code, out, err = run("generate", PROMPT, *kw, "--report", "--gpu-memory", "50%", "--set", "io_threads=1")
    assert code == 0 and not err
    got = json.loads(out)
    report = got["report"]
    assert got["text"] and report["runs"][0]["new_tokens"] == 8 and report["config"]["io_threads"] == 1
    assert report["cache"]["slots"] == 12 and report["plan"]["verdict"] == "fits with offload"
    assert report["config"]["context"] == 128 and report["config"]["dtype"] == "float32" and report["peak"] > 0
    code, out, _ = run("generate", PROMPT, *kw, "--temperature", "1.5", "--seed", "7")
    assert code == 0 and set(json.loads(out)) == {"text"}
    assert run("generate", PROMPT, *kw, "--temperature", "1.5", "--seed", "7")[1] == out


@pytest.mark.parametrize("kind", ["json", "toml"])
def test_generate_config_file(kind, run, path, tmp_path):
    f = tmp_path / f"settings.{kind}"
    settings = {"model_path": str(path), "gpu_memory_budget": "30%", "context": 100, "preload": False}
    toml = "".join(f"{k} = {json.dumps(v)}\n" for k, v in settings.items())
    f.write_text(json.dumps(settings) if kind == "json" else toml)
    args = ("generate", PROMPT, "--config", f, "--max-new-tokens", 2, "--json", "--report", "--context", 90)
    code, out, err = run(*args)
    assert code == 0, err
    config = json.loads(out)["report"]["config"]
    assert config["gpu_memory_budget"] == "30%" and config["context"] == 90 and config["preload"] is False


@pytest.mark.parametrize("budget", ["3GB", "2000MB", "2500000000B", "1.5GiB", "auto"])
def test_generate_budgets(budget, run, path):
    args = ("--model", path, "--context", 64, "--max-new-tokens", 1, "--json", "--report", "--gpu-memory", budget)
    code, out, err = run("generate", PROMPT, *args)
    if code == 2 and "are free now" in err:
        pytest.skip("this machine has not that much memory")
    assert code == 0, err
    assert json.loads(out)["report"]["plan"]["verdict"] == "fits resident"


def test_plan(run, path):
    code, out, err = run("plan", path, "--gpu-memory", "8GB", "--context", 4096, "--batch", 1)
    assert code == 0 and not err
    for word in ("fits resident", "smallest budget", "KV cache", "bytes per token"):
        assert word in out
    code, out, err = run("plan", path, "--gpu-memory", "8GB", "--json", "--hit-rate", "0.5", "--expert-bits", 4)
    got = json.loads(out)
    assert code == 0 and got["plan"]["verdict"] == "fits resident" and got["per_token"]["hit_rate"] == 0.5
    assert got["inventory"]["components"]["routed_experts"]["params"] == 3 * 8 * 3 * 64 * 32
    code, out, err = run("plan", path / "config.json", "--gpu-memory", "50%", "--json")
    assert code == 0 and json.loads(out)["plan"]["slots"] == 12


def test_plan_says_when_it_cannot_run(run, path):
    code, out, err = run("plan", path, "--gpu-memory", "1MB", "--json")
    assert code == 1 and not err
    p = json.loads(out)["plan"]
    assert p["verdict"] == "cannot run" and p["slots"] == 0
    code, out, _ = run("plan", path, "--gpu-memory", f"{p['smallest_budget']}B")
    assert code == 0 and "fits with offload" in out
    assert run("plan", path, "--gpu-memory", f"{p['smallest_budget'] - 1}B")[0] == 1


def test_check(run):
    code, out, err = run("check", "--json")
    assert code == 0 and isinstance(json.loads(out), dict) and not err
    assert run("check")[0] == 0


GENERATE = {
    "no such model": (["--model", "/no/such/folder"], "no/such/folder"),
    "budget too small": (["--gpu-memory", "1MB"], "at least"),
    "no budget": (["--gpu-memory", "lots"], "lots"),
    "zero share": (["--gpu-memory", "0%"], "0"),
    "context": (["--context", "5", "--max-new-tokens", "5"], "raise --context"),
    "no new tokens": (["--max-new-tokens", "0"], "at least 1"),
    "set without value": (["--set", "preload"], "KEY=VALUE"),
    "set unknown": (["--set", "io_thread=2"], "io_threads"),
    "set wrong": (["--set", "io_threads=many"], "io_threads"),
    "set neither": (["--set", "strict=maybe"], "strict"),
    "no config file": (["--config", "/no/such.toml"], "no/such.toml"),
    "odd config file": (["--config", "/etc/hostname"], "json or .toml"),
    "device": (["--device", "cuda:9"], "cuda"),
    "odd device": (["--device", "tpu7"], "tpu7"),
    "negative temperature": (["--temperature=-1", "--max-new-tokens", "4"], "--temperature"),
    "tiny temperature": (["--temperature", "1e-300", "--max-new-tokens", "4"], "0.001"),
    "set nested": (["--set", "context=" + "[" * 100_000], "context="),
    "nobody's home": (["--model", "~nobody-here/x"], "~nobody-here/x"),
    "nobody's config": (["--config", "~nobody-here/x.json"], "no such configuration file"),
    "escapes": (["--model", "a\n\x1b[2Jb/c/d"], "a\\"),
    "huge seed": (["--seed", "1" + "0" * 20, "--max-new-tokens", "4"], "--seed"),
    "huge context": (["--context", "1" + "0" * 12], "context=1000000000000"),
}


@pytest.mark.parametrize("what", GENERATE)
def test_generate_errors(what, fails, path):
    args, word = GENERATE[what]
    assert word in fails("generate", PROMPT, "--model", path, "--context", 128, *args)


def test_more_errors(fails, path, tmp_path):
    assert "prompt" in fails("generate", "", "--model", path, "--context", 64)
    bare = write_checkpoint("olmoe", tmp_path / "bare")
    assert "tokenizer" in fails("generate", PROMPT, "--model", bare, "--context", 64)
    dense = tmp_path / "dense"
    dense.mkdir()
    (dense / "config.json").write_text('{"model_type": "llama"}')
    assert "llama" in fails("plan", dense, "--gpu-memory", "1GB")
    assert "config.json" in fails("plan", tmp_path / "nothing", "--gpu-memory", "1GB")
    assert "hit_rate" in fails("plan", path, "--gpu-memory", "1GB", "--hit-rate", 7)
    assert "context" in fails("plan", path, "--gpu-memory", "1GB", "--context", 0)
    assert "int4" in fails("plan", path, "--gpu-memory", "1GB", "--dtype", "int4")
    assert r"one\nline" in fails("plan", "one\nline", "--gpu-memory", "1GB")
    assert "~nobody-here" in fails("plan", "~nobody-here/x", "--gpu-memory", "1GB")
    assert "UTF-8" in fails("generate", "a \udcff", "--model", path)
    file = tmp_path / "digits.json"
    file.write_text('{"context": ' + "9" * 5000 + "}")
    assert "digits.json: holds a number" in fails("generate", PROMPT, "--config", file)


BENCH = {
    "--rounds 0: at least 1": ["--rounds", 0],
    "--max-new-tokens 1: at least 2": ["--max-new-tokens", 1],
    "--layers -1: at least 1": ["--layers", -1],
    f"--max-new-tokens {10**9}: at least 2 and at most 4000": ["--max-new-tokens", 10**9],
    f"--layers {10**9}: at least 1 and at most 1000": ["--layers", 10**9],
    "'lots'": ["--budgets", "50%", "lots"],
    "'-1GB'": ["--budgets=-1GB"],
}


@pytest.mark.parametrize("command", ["bench", "bench-device"])
@pytest.mark.parametrize("words", BENCH)
def test_a_benchmark_that_cannot_be(command, words, fails, monkeypatch):
    "Is refused before a model is made or loaded."
    monkeypatch.setitem(sys.modules, "expertflow.bench", None)
    monkeypatch.setitem(sys.modules, "expertflow.devicebench", None)
    assert words in fails(command, "--model", "random-olmoe", *BENCH[words])


@pytest.mark.parametrize("command", [["bench"], ["bench-device", "--device", "cpu"]])
def test_a_benchmark_of_no_model(command, fails, path, tmp_path):
    assert "no config.json" in fails(*command, "--model", tmp_path)
    damaged = tmp_path / "damaged"
    shutil.copytree(path, damaged)
    file = next(damaged.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])
    assert "truncated" in fails(*command, "--model", damaged)
    (damaged / "config.json").write_text("{")
    assert "config.json" in fails(*command, "--model", damaged)


def test_an_error_in_a_process_of_its_own(process, path):
    code, out, err = process("generate", PROMPT, "--model", path, "--gpu-memory", "1MB", "--context", 128)
    assert code == 2 and not out and err.startswith("expertflow: error: ") and err.count("\n") == 1


def test_usage(run):
    for args in ([], ["generate"], ["generate", "x", "--tokens", "3"], ["nothing"], ["plan"]):
        code, out, err = run(*args)
        assert code == 2 and not out and err.startswith("usage: expertflow") and "Traceback" not in err
    code, out, err = run("--help")
    assert code == 0 and "generate" in out and not err
    code, out, err = run("generate", "--help")
    assert code == 0 and "50%" in out


def test_typing_errors_are_quick(process):
    "A wrong setting is refused before torch is imported."
    code, _, err = process("generate", "x", "--set", "io_thread=2", env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert code == 2 and "io_threads" in err and "torch" not in err


def test_ctrl_c(repo, path):
    "Ctrl-C in the middle of the answer: exit status 130, one line, and what was written so far."
    args = ("--model", path, "--context", 6000, "--max-new-tokens", 5900, "--set", "preload=false")
    p = start("generate", PROMPT, *args, repo=repo, env={"PYTHONUNBUFFERED": "1"})
    assert p.stdout.read(1), p.stderr.read()
    time.sleep(0.3)
    p.send_signal(signal.SIGINT)
    _, err = p.communicate(timeout=30)
    assert p.returncode == 130 and err == "expertflow: interrupted\n", err


def test_reader_goes_away(repo, path):
    "`| head`: no traceback."
    args = ("--model", path, "--context", 20000, "--max-new-tokens", 3000)
    p = start("generate", PROMPT, *args, repo=repo)
    assert p.stdout.read(1)
    p.stdout.close()
    assert p.wait(60) == 0 and "Traceback" not in p.stderr.read()


@pytest.mark.parametrize("command", [["--help"], ["plan", "PATH", "--gpu-memory", "1GB"], ["check", "--json"]])
def test_nobody_reads(command, repo, path):
    "What is written at the end of a command finds no reader: neither a traceback nor Python's complaint at exit."
    p = start(*[str(path) if x == "PATH" else x for x in command], repo=repo)
    p.stdout.close()
    assert p.wait(120) == 0 and p.stderr.read() == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk(repo, path):
    "What the system refuses is one line, too."
    with open("/dev/full", "w") as full:
        command = [*ENTRY, "plan", str(path), "--gpu-memory", "1GB"]
        env = {**os.environ, "PYTHONPATH": str(repo)}
        p = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=env, timeout=120)
    assert p.returncode == 2 and p.stderr == "expertflow: error: No space left on device\n", p.stderr


def test_a_terminal_of_few_letters(process, path):
    "The tiny model writes bytes that are no text; a terminal in ASCII shows question marks for them."
    kw = ("--model", path, "--context", 128, "--max-new-tokens", 16)
    text = process("generate", PROMPT, *kw)[1]
    code, out, err = process("generate", PROMPT, *kw, env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert code == 0 and not err and not text.isascii()
    assert out == text.encode("ascii", "replace").decode()


def test_trace(run, path, tmp_path):
    "Recorded, and looked at again; the trace says what the text was."
    import lzma

    (tmp_path / "a.txt").write_text("A few of the experts are needed. " * 30)
    (tmp_path / "b.txt.xz").write_bytes(lzma.compress(b"The lazy dog."))
    texts = (tmp_path / "a.txt", tmp_path / "b.txt.xz")
    code, out, _ = run("trace", "--model", path, "--text", *texts, "--out", tmp_path / "t", "--block", 50, "--generate", 3,
                       "--context", 64, "--hidden", "input", "--json")  # fmt: skip
    s = json.loads(out)
    assert code == 0 and s["decoded"] == 2 * s["sequences"] and s["cold"]["of"] == sum(s["layers"]["experts"]) > 0
    code, again, _ = run("trace", "--stats", tmp_path / "t", "--json")
    assert code == 0 and json.loads(again) == s
    code, text, _ = run("trace", "--stats", tmp_path / "t", "--cold", "0.2")
    assert code == 0 and text.startswith(f"{s['tokens']} tokens") and "cold" in text

    from expertflow.trace import load_trace
    t = load_trace(tmp_path / "t")
    assert set(t.labels) == {"a.txt", "b.txt.xz"} and t.hidden is not None and t.about["hidden"] == "router input"


def test_trace_statistics_need_no_torch(process, tmp_path):
    (tmp_path / "p.csv").write_text("0,1\n0,2\n1,3\n1,4\n0,5\n0,6\n1,7\n1,0\n")
    code = "import sys; sys.modules['torch'] = None; from expertflow.cli import main; sys.exit(main(['trace', *sys.argv[1:]]))"
    done = subprocess.run([sys.executable, "-c", code, "--stats", str(tmp_path / "p.csv")], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("2 tokens"), done.stderr


def test_trace_errors(fails, path, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "odd.txt").write_bytes(b"\xff\xff")
    (tmp_path / "p.csv").write_text("0,1\n0,x\n")
    record = ("trace", "--model", path, "--out", tmp_path / "t", "--text")
    assert "--stats FOLDER" in fails("trace")
    assert "--stats FOLDER" in fails("trace", "--text", tmp_path / "empty.txt")
    assert "p.csv: line 2" in fails("trace", "--stats", tmp_path / "p.csv")
    assert "no trace.json" in fails("trace", "--stats", tmp_path)
    assert "cannot be read as UTF-8" in fails(*record, tmp_path / "odd.txt")
    assert "cannot be read as UTF-8" in fails(*record, tmp_path / "missing.txt")
    assert "at most --context" in fails(*record, tmp_path / "odd.txt", "--block", 5000)
    assert "no text" in fails(*record, tmp_path / "empty.txt", "--context", 600)
    assert "share" in fails("trace", "--stats", tmp_path / "t", "--cold", 2)


def test_simulate(run, process, tmp_path):
    "A recording over a grid; without torch."
    pairs = [(layer, (t * t + layer) % 8, (t * t + layer + 1 + t % 3) % 8) for t in range(60) for layer in (0, 1)]
    (tmp_path / "r.csv").write_text("layer,expert\n" + "".join(f"{a},{b}\n{a},{c}\n" for a, b, c in pairs))
    command = ("simulate", tmp_path / "r.csv", "--slots", 6, "50%", "--link", "pcie3x4", "2GB/s", "--policy", "lru",
               "--expert-bytes", "1MB")  # fmt: skip
    code, out, _ = run(*command, "--json")
    results = json.loads(out)
    assert code == 0 and [r["slots"] for r in results] == [6, 6, 8, 8]
    assert [r["link"] for r in results] == ["pcie3x4", "2GB/s"] * 2
    assert all(r["simulated"] and r["loads"] >= r["yardsticks"]["least"] for r in results)
    code, text, _ = run(*command, "--foresight", 0.8, "--per-layer", "--tokens", 20)
    assert code == 0 and text.count("replay") == 4 and "prefetched in time" in text and "MIN" in text
    code = "import sys; sys.modules['torch'] = None; from expertflow.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, *map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("replay") == 4, done.stderr


def test_simulate_errors(fails, tmp_path):
    (tmp_path / "r.csv").write_text("0,1\n0,2\n1,3\n1,4\n0,5\n0,6\n1,7\n1,0\n")
    go = ("simulate", tmp_path / "r.csv")
    assert "--expert-bytes" in fails(*go)
    go += ("--expert-bytes", "1MB")
    bad = {"--slots 0": "25%", "--slots many": "25%", "--slots 120%": "100%", "--link usb": "pcie3x4", "--link 0GB": "pcie3x4",
           "--policy belady": "lru", "--layer-ms nan": "--layer-ms", "--tokens 0": "--tokens", "--foresight 1.5": "recall",
           "--expert-bytes big": "big"}  # fmt: skip
    for options, says in bad.items():
        assert says in fails(*go, *options.split())
    assert "none.npz" in fails("simulate", tmp_path / "none.npz", "--expert-bytes", "1MB")


def test_train_both_kinds(run, tmp_path):
    "A predictor of each kind from a text file; what is for the other kind is refused before anything runs."
    text = tmp_path / "text.txt"
    text.write_text("".join(f"The captain of ship {i} looked at the sea and was silent {i * 7 % 31} days. " for i in range(500)))
    small = ("train", "tiny-moe", text, "--tokens", 1536, "--length", 48, "--epochs", 1, "--json", "--out")
    rc, out, _ = run(*small, tmp_path / "layers.safetensors")
    assert rc == 0 and json.loads(out)["kind"] == "layer-ahead predictor"
    rc, out, _ = run(*small, tmp_path / "path.safetensors", "--kind", "path")
    card = json.loads(out)
    assert rc == 0 and card["kind"] == "path" and 1e-3 <= card["share"] <= 1e-2 and len(card["held_out"]) == 5
    assert sorted(f.name for f in tmp_path.iterdir()) == ["layers.safetensors", "path.safetensors", "text.txt"]
    rc, out, err = run(*small, tmp_path / "no.safetensors", "--kind", "path", "--context")
    assert rc == 2 and "--context" in err and not out and not (tmp_path / "no.safetensors").exists()


# ---- many prompts ----


def test_many_prompts(run, fails, path, tmp_path, monkeypatch):
    "Answers in the order asked, those of `generate_many`; as text, as JSON, from standard input."
    from expertflow.flow import ExpertFlow

    asked = [PROMPT, "Once upon a time", "To be or not"]
    file, jsonl = tmp_path / "p.txt", tmp_path / "p.jsonl"
    file.write_text("\n\n".join(asked) + "\n", encoding="utf-8")
    jsonl.write_text("\n".join([json.dumps(asked[0]), json.dumps({"prompt": asked[1]}), json.dumps({"prompt": asked[2]})]))
    more = ("--model", path, "--gpu-memory", "50%", "--context", 128, "--max-new-tokens", 6)
    with ExpertFlow.from_pretrained(path, gpu_memory_budget="50%", context=128) as flow:
        want = flow.generate_many(asked, max_new_tokens=6, do_sample=False)
    for name in (file, jsonl):
        code, out, _ = run("generate", "--prompts", name, "--json", "--report", *more)
        found = json.loads(out)
        assert code == 0 and [x["prompt"] for x in found["answers"]] == asked and [x["text"] for x in found["answers"]] == want
        assert found["report"]["runs"]
    code, out, _ = run("generate", "--prompts", file, *more)
    assert code == 0 and [out.index(f"[{i + 1}] {x}\n{want[i].strip()}") for i, x in enumerate(asked)] == sorted(
        out.index(f"[{i + 1}] {x}\n{want[i].strip()}") for i, x in enumerate(asked)
    )
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(asked[1].encode())))
    code, out, _ = run("generate", "--prompts", "-", "--json", *more)
    assert code == 0 and json.loads(out)["answers"] == [{"prompt": asked[1], "text": want[1]}]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-16"])
def test_prompts_are_utf8_whatever_the_locale(run, path, tmp_path, monkeypatch, encoding):
    more = ("--json", "--model", path, "--context", 64, "--max-new-tokens", 2)
    data = "\ufeff\u201efox\u201c\r\ncaf\u00e9\r\n".encode()  # with the mark that some editors put first
    want = ["\u201efox\u201c", "caf\u00e9"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding, "surrogateescape"))
    (tmp_path / "p.txt").write_bytes(data)
    for name in ("-", tmp_path / "p.txt"):
        code, out, _ = run("generate", "--prompts", name, *more)
        assert code == 0 and [x["prompt"] for x in json.loads(out)["answers"]] == want


def test_prompts_without_standard_input(fails, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)  # what Python has if it was closed
    assert "standard input is closed" in fails("generate", "--prompts", "-")
    closed = io.TextIOWrapper(io.BytesIO(b"fox"))
    closed.close()
    monkeypatch.setattr("sys.stdin", closed)
    assert "--prompts -: cannot be read" in fails("generate", "--prompts", "-")


def test_many_prompts_that_are_none(run, fails, path, tmp_path):
    more = ("--model", path, "--context", 64, "--max-new-tokens", 8)
    for words in ((), (PROMPT, "--prompts", "x")):
        code, _, err = run("generate", *words, *more)
        assert code == 2 and err.startswith("usage: expertflow generate") and "give either a PROMPT or --prompts FILE" in err
    assert "cannot be read" in fails("generate", "--prompts", tmp_path / "none", *more)
    cases = {"a.txt": (b"\n \n", "no prompt in it"), "b.txt": (b"\xff\xfe", "cannot be read as UTF-8"),
             "c.jsonl": (b'"fine"\n{"text": 1}', "c.jsonl, line 2: write"),
             "d.jsonl": (b'"fine"\n\n[', "d.jsonl, line 3: not JSON"),
             "e.txt": (f"fox\n{'fox ' * 200}".encode(), "prompt 2 has"),
             "f.jsonl": (b'"fox"\n["fox"]', "prompt 2: ")}  # fmt: skip
    for name, (data, why) in cases.items():
        (tmp_path / name).write_bytes(data)
        assert why in fails("generate", "--prompts", tmp_path / name, *more)


def test_many_prompts_of_which_one_cannot_be_answered(run, path, tmp_path, monkeypatch):
    "What was answered before is printed; then the error."
    from expertflow import flow as module

    def two_then(flow, prompts, *args):
        yield 0, "first"
        raise module.UnfinishedError("prompt 1: boom", [1])

    monkeypatch.setattr(module, "stream_texts", two_then)
    (tmp_path / "p.txt").write_text("a\nb")
    more = ("--model", path, "--context", 64, "--max-new-tokens", 4)
    code, out, err = run("generate", "--prompts", tmp_path / "p.txt", "--json", *more)
    assert code == 2 and "boom" in err
    assert [x["text"] for x in json.loads(out)["answers"]] == ["first", None]
