"""Everything that the page of one run shows, but for its curves and logs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from hvd_transformer.errors import UserError
from hvd_transformer.service.runs.checkpoints import Checkpoint, checkpoints
from hvd_transformer.service.runs.launcher_beats import LauncherBeats
from hvd_transformer.service.runs.logs import log_names
from hvd_transformer.service.runs.metrics.curve import Curve
from hvd_transformer.service.runs.metrics.curves import Curves
from hvd_transformer.service.runs.ranks import RankState, rank_states, read_heartbeats
from hvd_transformer.service.runs.samples import StepSamples, newest_samples
from hvd_transformer.service.runs.status import RunStatus
from hvd_transformer.service.runs.watched_run import RunRow


@dataclass(frozen=True)
class RunDetails:
    """One run. `late`: one sentence that names the rank that the others wait for, or that is silent or slow."""

    row: RunRow
    ranks: Sequence[RankState]
    late: str | None
    checkpoints: Sequence[Checkpoint]
    logs: Sequence[str]  # what `log_page` takes
    samples: Sequence[StepSamples]


def run_details(row: RunRow, curves: Curves, launchers: LauncherBeats) -> RunDetails:
    """The run as it is now. Files that are missing or unreadable leave their part empty.

    Of a launched run that is looked at for the first time, it may take a second and a half.
    """
    try:
        curve = curves.of(row.path)
    except UserError:
        curve = Curve(row.path)  # an empty one
    ranks: Sequence[RankState] = ()
    late = None
    if row.status in (RunStatus.RUNNING, RunStatus.UNKNOWN):
        beats = launchers.of(row.path)
        ranks, late = rank_states(beats or read_heartbeats(row.path), curve.comparisons(), launched=bool(beats))
    evaluations = partial(curve.values_at, prefix="valid_")
    return RunDetails(
        row, ranks, late, checkpoints(row.path, evaluations), log_names(row.path), newest_samples(row.path)
    )
