"""Makes the README's picture of the dashboard, in JupyterLab and a real browser, at 1280 x 800:

    python tests/make_dashboard_png.py [docs/dashboard.png]
"""
import io
import sys
import tempfile
from pathlib import Path

from lab import REPO, Notebook, browser_page, missing, server, write_notebook
from PIL import Image

CELLS = ("""from expertflow import ExpertFlow
flow = ExpertFlow.from_pretrained("smollm2-moe", gpu_memory_budget="50%")""", """panel = flow.dashboard()
panel""")
QUIET = """from transformers.utils import logging
logging.disable_progress_bar()"""


def shoot(to: Path) -> int:  # bytes
    with tempfile.TemporaryDirectory() as folder, server(Path(folder)) as address, browser_page(1280, 800) as page:
        write_notebook(Path(folder) / "watch.ipynb", *CELLS)
        nb = Notebook(page, address, "watch.ipynb")
        nb.ask(f"exec({QUIET!r})")
        page.evaluate("() => window.jupyterapp.commands.execute('application:toggle-left-area')")
        assert nb.run_all()
        page.wait_for_selector("canvas.ef-cells")
        page.locator("canvas.ef-cells").scroll_into_view_if_needed()
        page.get_by_role("button", name="Run", exact=True).click()
        nb.until("len(panel.speaker.meter.ticks) > 60", 300)
        page.locator(".lm-TabBar-tab", has_text="Controls").scroll_into_view_if_needed()
        picture = Image.open(io.BytesIO(page.screenshot()))
        nb.ask("panel.close()")
        assert not page.complaints, page.complaints
    picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(to, optimize=True)
    return to.stat().st_size


if __name__ == "__main__":
    if why := missing(): sys.exit(why)
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else REPO / "docs" / "dashboard.png"
    print(f"{path.name}: {shoot(path)} bytes")
