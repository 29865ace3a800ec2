"""`hvd-transformer serve` with another program in place of the launcher: `python serve_with.py PROGRAM serve ...`."""

import sys
from functools import partial

from hvd_transformer.cli.main import main
from hvd_transformer.service import service

if __name__ == "__main__":
    program = sys.argv.pop(1)
    service.Launchers = partial(service.Launchers, command=(program,))  # type: ignore[misc,assignment]
    main()
