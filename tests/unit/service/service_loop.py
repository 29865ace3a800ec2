"""A service without pages, as a process that a test can kill: `python service_loop.py STATE LAUNCHER...`."""

import signal
import sys
import threading
from pathlib import Path

from hvd_transformer.service.launching.attempts import Launchers
from hvd_transformer.service.manager import Manager
from hvd_transformer.service.storage.store import Store


def main() -> None:
    state, *command = sys.argv[1:]
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: ended.set())
    store, launchers = Store(Path(state) / "service.db"), Launchers(Path(state), command)
    manager = Manager(store, launchers, lambda run: None)
    manager.recover()
    print("adopted", flush=True)
    manager.start()
    ended.wait()
    manager.close()
    launchers.close()
    store.close()


if __name__ == "__main__":
    main()
