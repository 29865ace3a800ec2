"""A rank comes to its first step without the libraries that take seconds to import, and on some of which torch insists.

Training and a whole step, not only the imports of our modules: torch imports its compiler and sympy when first called.
"""

import subprocess
import sys
from pathlib import Path

ONE_STEP = """
import sys
sys.path.insert(0, sys.argv[1])
from small_job import settings, trainer
from hvd_transformer.training import session, train_job

job = trainer(settings())
job.step(next(job.steps()))
print(sorted({"matplotlib", "sympy", "tensorboard", "torch._dynamo"} & sys.modules.keys()))
"""


def test_the_first_step_needs_no_slow_library() -> None:
    command = [sys.executable, "-c", ONE_STEP, str(Path(__file__).parents[2])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
