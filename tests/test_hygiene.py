"The rules of the house, as far as a machine can check them: notebooks, layers, and that the modules are what the notebooks say."
import ast
import filecmp
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted(p for p in (REPO / "nbs").rglob("*.ipynb")
                   if not any(s.startswith((".", "_")) for s in p.relative_to(REPO).parts))
MODULES = sorted(p for p in (REPO / "expertflow").glob("*.py") if p.stem not in ("__init__", "_modidx"))
NO_TORCH = ("config", "hardware", "trace", "cache", "forecast", "evictor", "quality", "yardsticks", "grouping", "simulator",
            "map")
MOST_LINES = 45
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def text_of(x: str | list[str]) -> str: return x if isinstance(x, str) else "".join(x)


def cells(path: Path, kind: str = "code") -> list[dict]:
    return [c for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == kind]


def directives(source: str) -> list[str]: return re.findall(r"^\s*#\s*\|\s*(.+?)\s*$", source, re.MULTILINE)


def is_exported(source: str) -> bool: return any(d.split()[0] in ("export", "exports", "exporti") for d in directives(source))


def module_of(path: Path) -> str | None:
    "The module that a notebook exports to."
    names = [d.split()[1] for c in cells(path) for d in directives(text_of(c["source"])) if d.startswith("default_exp ")]
    return names[0] if names else None


# notebooks

@each
def test_notebook_is_clean(path):
    nb = json.loads(path.read_text(encoding="utf-8"))
    assert path.stat().st_size < 300_000, "more than 300 kB: are the pictures small?"
    assert "widgets" not in nb["metadata"], "saved widget state: nbdev-clean, and switch saving of widget state off"
    assert len({c["id"] for c in nb["cells"]}) == len(nb["cells"]), "two cells have the same id"
    for c in cells(path):
        assert c["execution_count"] is None, "execution counts: run nbdev-clean"
        assert not c["metadata"], f"cell metadata {c['metadata']}: run nbdev-clean"


@each
def test_outputs_are_worth_reading(path):
    for c in cells(path):
        for o in c["outputs"]:
            where = f"output of the cell that begins {text_of(c['source'])[:60]!r}"
            assert o["output_type"] != "error", f"traceback in the {where}"
            assert o.get("name") != "stderr", f"warnings or progress bars in the {where}"
            assert not any("widget" in kind or "plotly" in kind for kind in o.get("data", {})), f"only PNG or SVG in the {where}"


HOMES = re.compile(r"(?<![\w./<])/(?:home|root|Users|tmp|work|opt|mnt|var/folders)/\w|[A-Z]:\\\\?Users")


@each
def test_no_path_of_somebodys_machine(path):
    texts = [text_of(c["source"]) for kind in ("code", "markdown") for c in cells(path, kind)]
    for c in cells(path):
        for o in c["outputs"]:
            texts += [text_of(o.get("text", "")), *(text_of(v) for k, v in o.get("data", {}).items() if k.startswith("text/"))]
    for t in texts:
        found = HOMES.search(t)
        assert not found, f"absolute path in {t[max(0, found.start() - 30):found.end() + 30]!r}"


@each
def test_notebook_tells_and_proves(path):
    first = next(iter(json.loads(path.read_text(encoding="utf-8"))["cells"]))
    head = first["cell_type"] == "markdown" and re.match(r"# \S.*\n+> \S", text_of(first["source"]))
    assert head, "begin with '# title' and '> one line'"
    if module_of(path) is None: return
    code = [text_of(c["source"]) for c in cells(path)]
    assert any(re.search(r"\bassert\b|\btest_\w+\(", s) for s in code if not is_exported(s)), "exports, but asserts nothing"
    shown = [s for s in code if "default_exp" not in s and "#| hide" not in s]
    assert 2 * len(cells(path, "markdown")) >= len(shown), "fewer than one cell of text for two of code"


@each
def test_cells_are_small(path):
    for c in cells(path):
        lines = [s for s in text_of(c["source"]).splitlines() if s.strip()]
        assert len(lines) <= MOST_LINES, f"{len(lines)} lines in the cell that begins {lines[0]!r} / {lines[1]!r}: one idea each"


def test_every_module_has_one_notebook():
    exports = [m for p in NOTEBOOKS if (m := module_of(p))]
    assert len(exports) == len(set(exports))
    assert set(exports) == {p.stem for p in MODULES}


# layers

def order() -> dict[str, str]:
    "Module -> the number of its notebook; as text, 01 < 01a < 02."
    return {m: re.match(r"\d+[a-z]?", p.stem)[0] for p in NOTEBOOKS if (m := module_of(p))}


def imports(path: Path) -> set[str]:
    "Modules of ours that a module imports, anywhere in it."
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            name = ("expertflow." if node.level else "") + (node.module or "")
            if name.strip(".") == "expertflow": found |= {a.name for a in node.names}
            elif name.startswith("expertflow."): found.add(name.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("expertflow.")}
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.stem)
def test_layers(path):
    rank = order()
    upward = {m for m in imports(path) if m in rank and rank[m] >= rank[path.stem]}
    assert not upward, f"{path.stem} ({rank[path.stem]}) imports {', '.join(f'{m} ({rank[m]})' for m in sorted(upward))}"


def test_layers_see_every_way_to_import(tmp_path):
    f = tmp_path / "m.py"
    f.write_text("from .a import x\nfrom . import b\nimport expertflow.c as k\n"
                 "def g():\n    from expertflow.d import y\nfrom expertflow import e\n"
                 "import json\nfrom expertflow_other import z\n")
    assert imports(f) == {"a", "b", "c", "d", "e"}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.stem)
def test_fastcore_stays_in_the_tests(path):
    assert not re.search(r"^\s*(from|import)\s+(fastcore|nbdev|matplotlib)\b", path.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("name", NO_TORCH)
def test_imports_without_torch(name):
    if not (REPO / f"expertflow/{name}.py").exists(): pytest.skip("no such module yet")
    code = f"import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'safetensors'))); import expertflow.{name}"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# round trip

def test_modules_are_what_the_notebooks_say(tmp_path):
    nbdev = Path(sys.executable).with_name("nbdev-export")
    if not nbdev.exists(): pytest.skip("nbdev is not installed")
    skip = shutil.ignore_patterns("__pycache__", "recipes", "models", ".ipynb_checkpoints", ".last_checked")
    for name in ("nbs", "expertflow"): shutil.copytree(REPO / name, tmp_path / name, ignore=skip)
    for name in ("pyproject.toml", "settings.ini", "README.md"): shutil.copy(REPO / name, tmp_path)
    for p in MODULES: (tmp_path / "expertflow" / p.name).unlink()      # so that one without a notebook is missed
    subprocess.run([nbdev], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    names = sorted(p.relative_to(REPO).as_posix() for p in (REPO / "expertflow").glob("*.py"))
    _, differ, missing = filecmp.cmpfiles(REPO, tmp_path, names, shallow=False)
    assert not differ and not missing, f"run nbdev-export; differ: {differ}, no notebook: {missing}"
