"No fact is written twice, and what is built contains what is needed."
import ast
import configparser
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

REPO = Path(__file__).resolve().parents[1]


def read(name: str) -> str: return (REPO / name).read_text(encoding="utf-8")


project = tomllib.loads(read("pyproject.toml"))
ini = configparser.ConfigParser(delimiters=["="])
ini.read_string(read("settings.ini"))
facts = ini["DEFAULT"]
LIVE = ("map", "dashboard", "play")      # modules that need the extra `lab`, or can use it
GROUPS = ("requirements", "lab_requirements", "dev_requirements")


def required(group: str) -> dict[str, Requirement]:
    found = [Requirement(r) for r in facts[group].split()]
    names = [canonicalize_name(r.name) for r in found]
    assert len(set(names)) == len(names), f"something occurs twice in {group}"
    return dict(zip(names, found))


def constraints() -> dict[str, Version]:
    lines = [s for s in read("constraints.txt").splitlines() if s and not s.startswith("#")]
    assert lines == sorted(lines, key=lambda s: s.split("=")[0]), "constraints.txt is in alphabetical order"
    parts = [re.fullmatch(r"([a-z0-9-]+)==([0-9.]+)", s) for s in lines]
    assert all(parts), "one name==version on each line"
    return {m[1]: Version(m[2]) for m in parts}


# each fact in one place

def test_pyproject_leaves_to_settings_what_is_written_there():
    p = project["project"]
    dynamic = set(p["dynamic"])
    assert dynamic == {"version", "description", "authors", "keywords", "classifiers", "dependencies", "optional-dependencies",
                       "entry-points", "scripts"}
    assert not dynamic & set(p)
    assert not {"name", "version", "license", "min_python", "python_requires", "url"} & set(facts)
    assert "python_requires" not in read("setup.py") and "license" not in read("setup.py")


def test_version_is_written_once():
    version = re.findall(r'^__version__ = "(\d+\.\d+\.\d+[a-z0-9.]*)"$', read("expertflow/__init__.py"), re.MULTILINE)
    assert len(version) == 1
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "expertflow.__version__"}


def test_floor_of_python_is_written_once():
    floor = project["project"]["requires-python"]
    assert floor == ">=3.11"        # here on purpose: raising it must be a decision
    assert "Python :: 3." not in facts["classifiers"]
    assert "target-version" not in project["tool"]["ruff"] and "python_version" not in project["tool"]["mypy"]
    assert floor.removeprefix(">=") in read(".github/workflows/ci.yml") and floor.removeprefix(">=") in read("README.md")


def test_licence():
    assert project["project"]["license"] == "Apache-2.0"
    text = " ".join(read("LICENSE").split())
    assert text.startswith("Apache License Version 2.0, January 2004") and text.endswith("limitations under the License.")
    assert "License ::" not in facts["classifiers"]     # pip refuses both
    assert "Apache-2.0" in read("README.md")


@pytest.mark.parametrize("name", ["expertflow", "nbs", "tests"])
def test_no_second_list_of_requirements(name):
    assert not list((REPO / name).rglob("requirements*.txt")) and not list(REPO.glob("requirements*.txt"))


# requirements

def test_runtime_needs_nothing_of_the_others():
    runtime = required("requirements")
    assert not set(runtime) & (set(required("dev_requirements")) | set(required("lab_requirements")))
    for r in runtime.values(): assert [s.operator for s in r.specifier] == [">="], f"{r}: a library gives lower bounds"


def test_nbdev_family_is_pinned_exactly():
    dev = required("dev_requirements")
    for name in ("nbdev", "execnb", "fastcore", "ghapi", "fastgit"):
        assert [s.operator for s in dev[name].specifier] == ["=="], name


def test_constraints_cover_what_is_not_pinned_and_nothing_twice():
    fixed = constraints()
    loose = {}
    for group in GROUPS:
        for name, r in required(group).items():
            if any(s.operator == "==" for s in r.specifier): assert name not in fixed, f"{name} is pinned twice"
            else: loose[name] = r
    assert set(loose) <= set(fixed), f"no tested version of {set(loose) - set(fixed)}"
    for name, r in loose.items(): assert r.specifier.contains(fixed[name]), f"{r} does not allow the tested {fixed[name]}"
    family = set(fixed) - set(loose)
    assert family == {"huggingface-hub", "tokenizers"}      # they come with transformers, and go with its version


def test_environment_has_what_settings_ask_for():
    "The tests run with what a user would get."
    for name, r in required("requirements").items():
        if r.marker and not r.marker.evaluate(): continue
        assert r.specifier.contains(Version(importlib.metadata.version(name)).base_version), r


def test_build_backend_is_the_one_in_the_development_requirements():
    backend, = project["build-system"]["requires"]
    assert backend in facts["dev_requirements"].split()


def test_modules_import_only_what_is_required():
    plain = {n.replace("-", "_") for n in (*required("requirements"), "huggingface-hub", "tokenizers")} | {"expertflow"}
    widgets = {n.replace("-", "_") for n in required("lab_requirements")} | {"traitlets"}     # which comes with them
    for path in (REPO / "expertflow").glob("*.py"):
        known = plain | widgets if path.stem in LIVE else plain
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import): names = [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level: names = [node.module]
            else: continue
            unknown = {n.split(".")[0] for n in names} - known - sys.stdlib_module_names
            assert not unknown, f"{path.name} imports {unknown}, which settings.ini does not require"


# one command for people and machines

def commands() -> list[str]: return re.findall(r"^pip install .*$", read("README.md"), re.MULTILINE)


def test_readme_has_the_two_commands():
    run, test = commands()[:2]
    assert re.fullmatch(r"pip install -c constraints\.txt -e \. && expertflow generate .+", run)
    assert re.fullmatch(r"pip install -c constraints\.txt -e '\.\[dev\]' && pytest\b.*", test)


def test_ci_takes_its_command_from_the_readme():
    script = read(".ci/run")
    assert script.startswith("#!/usr/bin/env bash\n") and "\nset -euo pipefail\n" in script
    assert "pytest" not in script.replace("# ", "")
    if sys.platform != "win32": assert (REPO / ".ci/run").stat().st_mode & 0o111, "chmod +x .ci/run"
    assert script.rstrip().endswith('bash -euo pipefail -c "$test"'), "the tests come last"
    grep = re.search(r"command=\$\((grep .+?)\) \|\|", script)[1]
    found = subprocess.run(["bash", "-c", grep], cwd=REPO, capture_output=True, text=True)
    assert found.stdout.strip() == commands()[1]
    assert ".ci/run" in read(".github/workflows/ci.yml") and "pytest" not in read(".github/workflows/ci.yml")


def test_ci_tests_the_oldest_transformers():
    oldest = next(iter(required("requirements")["transformers"].specifier)).version
    assert re.search(rf'transformers: "{re.escape(oldest)}(\.0)?"', read(".github/workflows/ci.yml"))


# what is built

def copy_of_source(folder: Path) -> Path:
    "A copy, as building leaves things behind."
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info", ".git", "build", "dist", ".*_cache", ".venv")
    shutil.copytree(REPO, folder / "source", ignore=skip)
    return folder / "source"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    "Built with an extra package below ours, which a wrong list of packages would lose without a word."
    if Version(importlib.metadata.version("setuptools")) < Version("77"): pytest.skip("setuptools is too old to build with")
    tmp = tmp_path_factory.mktemp("build")
    source = copy_of_source(tmp)
    for name in ("deep/__init__.py", "extra.js", "recipes/example.bin", "models/a/b.bin", "predictors/c.bin"):
        (source / "expertflow" / name).parent.mkdir(parents=True, exist_ok=True)
        (source / "expertflow" / name).write_text("")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(next(tmp.glob("*.whl")))


@pytest.mark.slow
def test_wheel_contains_the_data(wheel):
    names = set(wheel.namelist())
    files = [p for p in (REPO / "expertflow").rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    ours = {p.relative_to(REPO).as_posix() for p in files}
    data = ("/recipes/", "/models/", "/predictors/")
    wanted = {n for n in ours if n.endswith((".py", "py.typed", ".js")) or any(d in n for d in data)}
    more = ("py.typed", "deep/__init__.py", "extra.js", "recipes/example.bin", "models/a/b.bin", "predictors/c.bin")
    wanted |= {f"expertflow/{n}" for n in more}
    assert wanted <= names
    assert not {n for n in names if n.startswith(("tests/", "nbs/"))}
    assert any(n.endswith("licenses/LICENSE") for n in names)


@pytest.mark.slow
def test_wheel_says_what_settings_say(wheel):
    info = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    m = Parser().parsestr(wheel.read(info).decode())
    assert (m["Name"], m["Summary"], m["Author"]) == ("expertflow", facts["description"], facts["author"])
    assert m["License-Expression"] == "Apache-2.0" and m["Requires-Python"] == project["project"]["requires-python"]
    assert m["Version"] in read("expertflow/__init__.py")
    assert set(m["Keywords"].split(",")) == set(facts["keywords"].split())
    assert m.get_all("Classifier") == facts["classifiers"].strip().splitlines()
    got = {str(Requirement(r)) for r in m.get_all("Requires-Dist")}
    plain = {str(Requirement(r)) for r in facts["requirements"].split()}
    extra = {str(Requirement(f'{r}; extra == "{x}"')) for x in ("lab", "dev") for r in facts[f"{x}_requirements"].split()}
    assert got == plain | extra
    points = configparser.ConfigParser(delimiters=["="])
    points.read_string(wheel.read(info.replace("METADATA", "entry_points.txt")).decode())
    assert {k: dict(v) for k, v in points.items() if k != "DEFAULT"} == {
        "console_scripts": {"expertflow": "expertflow.cli:main"}, "nbdev": {"expertflow": "expertflow._modidx:d"}}


@pytest.mark.slow
def test_source_archive_can_be_installed_from(tmp_path):
    "setup.py reads settings.ini, which is only in the archive if MANIFEST.in says so."
    if Version(importlib.metadata.version("setuptools")) < Version("77"): pytest.skip("setuptools is too old to build with")
    source = copy_of_source(tmp_path)
    command = [sys.executable, "setup.py", "-q", "sdist", "-d", str(tmp_path)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=300)
    archive = next(tmp_path.glob("*.tar.gz"))
    shutil.unpack_archive(archive, tmp_path / "unpacked")
    top, = (tmp_path / "unpacked").iterdir()
    files = {p.relative_to(top).as_posix() for p in top.rglob("*") if p.is_file()}
    assert {"settings.ini", "setup.py", "pyproject.toml", "LICENSE", "README.md", "constraints.txt"} <= files
    assert {p.relative_to(REPO).as_posix() for p in (REPO / "nbs").glob("[0-9]*.ipynb")} <= files
