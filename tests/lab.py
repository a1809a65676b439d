"""JupyterLab and a real browser, for the tests of what people see. Needs jupyterlab, playwright and a Chromium of the system:

    apt-get install chromium fonts-dejavu-core; pip install -e '.[dev,lab]'     # no `playwright install`
"""
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
REPO = Path(__file__).resolve().parents[1]
NO_NEWS = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False}}


def missing() -> str | None:
    "Why there can be no browser here; None: there can."
    for name in ("jupyterlab", "playwright", "anywidget"):
        if importlib.util.find_spec(name) is None: return f"{name} is not installed: pip install -e '.[dev,lab]'"
    return None if CHROMIUM else "no Chromium: install the system's chromium, or name one in CHROMIUM"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def server(folder: Path, dark: bool = False) -> Iterator[str]:
    "JupyterLab over `folder`, with nothing of the user's own configuration; gives its address."
    home, port = folder / ".jupyter", free_port()
    names = {f"JUPYTER_{n}_DIR": str(home / n.lower()) for n in ("CONFIG", "DATA", "RUNTIME")}
    env = os.environ | names | {"IPYTHONDIR": str(home / "ipython"), "PYTHONPATH": f"{REPO}{os.pathsep}{REPO / 'tests'}"}
    env.pop("IN_TEST", None)
    settings = home / "config" / "labconfig" / "default_setting_overrides.json"
    settings.parent.mkdir(parents=True)
    more = {"@jupyterlab/apputils-extension:themes": {"theme": "JupyterLab Dark"}} if dark else {}
    settings.write_text(json.dumps(NO_NEWS | more))
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}",
               "--ServerApp.port_retries=0", "--IdentityProvider.token=test", f"--ServerApp.root_dir={folder}",
               "--LabApp.expose_app_in_browser=True"]
    with serving(command, env, folder, f"http://127.0.0.1:{port}", "/api?token=test") as address: yield address


@contextmanager
def voila(notebook: Path) -> Iterator[str]:
    "The notebook as a page without code; gives its address."
    port, folder = free_port(), notebook.parent
    env = os.environ | {"IPYTHONDIR": str(folder / "ipython"), "PYTHONPATH": f"{REPO}{os.pathsep}{REPO / 'tests'}"}
    env.pop("IN_TEST", None)
    command = [sys.executable, "-m", "voila", str(notebook), "--no-browser", "--Voila.ip=127.0.0.1", f"--port={port}"]
    with serving(command, env, folder, f"http://127.0.0.1:{port}", "/voila/static/voila.js") as address: yield address


@contextmanager
def serving(command: list[str], env: dict[str, str], folder: Path, address: str, there: str) -> Iterator[str]:
    "A server, from its first answer at `there` on."
    with open(folder / "server.log", "w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=folder)
    try:
        wait_for(address + there, process, folder / "server.log")
        yield address
    finally:
        process.terminate()
        process.wait(20)


def wait_for(address: str, process: subprocess.Popen, log: Path, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None: raise RuntimeError(f"the server has ended: {log.read_text()[-2000:]}")
        try:
            urllib.request.urlopen(address, timeout=2).read()
            return
        except OSError: time.sleep(0.3)
    raise RuntimeError(f"the server did not answer within {seconds:g} s: {log.read_text()[-2000:]}")


@contextmanager
def browser_page(width: int = 1280, height: int = 1600) -> Iterator[Any]:
    "A page of a headless Chromium; `page.complaints` collects errors that it writes to its console."
    from playwright.sync_api import sync_playwright
    with sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"])
        page = chromium.new_page(viewport={"width": width, "height": height})
        page.complaints = []
        page.on("console", lambda m: page.complaints.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: page.complaints.append(str(e)))
        try: yield page
        finally: chromium.close()


class Notebook:
    "A notebook open in a page."

    def __init__(self, page: Any, address: str, name: str):
        self.page, self.name = page, name
        self.panel = f"[...window.jupyterapp.shell.widgets('main')].find(w => w.context?.path === '{name}')"
        page.goto(f"{address}/lab/tree/{name}?token=test&reset", wait_until="domcontentloaded")
        idle = f"() => window.jupyterapp && {self.panel}?.sessionContext?.session?.kernel?.status === 'idle'"
        for attempt in range(3):                            # a reload cures the rare kernel that never connects
            try:
                page.wait_for_function(idle, timeout=60_000)
                break
            except Exception:
                if attempt == 2: raise
                page.reload(wait_until="domcontentloaded")
        page.evaluate(f"() => window.jupyterapp.shell.activateById({self.panel}.id)")

    def run_all(self) -> bool:
        "Whether all cells ended without an error."
        return self.page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')")

    def ask(self, expression: str) -> Any:
        "The value of a Python expression in the kernel (what `repr` and `eval` can carry)."
        code = """async ([panel, expr]) => {
            const f = eval(panel).sessionContext.session.kernel.requestExecute(
                {code: '', silent: true, store_history: false, user_expressions: {r: expr}});
            const reply = await f.done;
            return reply.content.user_expressions.r;
        }"""
        answer = self.page.evaluate(code, [self.panel, f"repr({expression})"])
        if answer["status"] != "ok": raise RuntimeError(f"{answer['ename']}: {answer['evalue']}")
        return eval(eval(answer["data"]["text/plain"]))     # the repr of a repr, of our own kernel

    def until(self, expression: str, seconds: float = 60) -> Any:
        "Waits until the expression is true in the kernel."
        end = time.monotonic() + seconds
        while not (value := self.ask(expression)):
            if time.monotonic() > end: raise TimeoutError(f"{expression} did not become true within {seconds:g} s")
            self.page.wait_for_timeout(150)
        return value

    def close(self) -> None:
        self.page.evaluate(f"() => {self.panel}.sessionContext.shutdown()")


def write_notebook(path: Path, *cells: str) -> None:
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    body = [{"cell_type": "code", "id": f"c{i}", "metadata": {}, "execution_count": None, "outputs": [], "source": s}
            for i, s in enumerate(cells)]
    path.write_text(json.dumps({"cells": body, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}))
