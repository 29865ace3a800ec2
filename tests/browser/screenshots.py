"""Pictures of the four pages, light and dark, for docs/: `cd tests && python -m browser.screenshots ../docs`."""

import sys
import tempfile
import threading
import time
from pathlib import Path

from browser.chromium import DESK, Browser
from browser.fake_api import State
from browser.fake_run import run_id
from browser.fake_service import FakeServer

_SETTLED_SECONDS = 8.0  # the charts of the comparison take longest
_PAGES = {
    "runs": "/",
    "run": f"/runs/{run_id(1)}?smooth=0.6",
    "compare": "/compare?runs=" + ",".join(map(run_id, (100, 102, 107, 115))),
    "hosts": "/hosts",
}


def main() -> None:
    folder = Path(sys.argv[1])
    state = State(400, queue_on=True)
    # Hostile names are for tests.
    state.runs = [run for run in state.runs if "<" not in run.name]
    state.hosts[5]["findings"] = ["clock is 3 s ahead of the head node"]
    server = FakeServer(state)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(Path(profile))
        browser.driver.get(f"{server.url}/#token=admin-token")
        for dark in (False, True):
            browser.screen(DESK, dark)
            for name, path in _PAGES.items():
                browser.driver.get(server.url + path)
                time.sleep(_SETTLED_SECONDS)
                browser.driver.save_screenshot(str(folder / f"service-{name}{'-dark' if dark else ''}.png"))
        browser.quit()


if __name__ == "__main__":
    main()
