"""`hvd-transformer sweep`: trains with many settings and shows which are best."""

import sys
from pathlib import Path

import click

from hvd_transformer.cli import options, service_options


@click.command()
@click.argument("file", type=options.PATH)
@service_options.server
@click.option("--local", is_flag=True, help="Train here, one trial after the other, also if a service runs.")
@click.option("--retry-failed", is_flag=True, help="Train failed trials again, from their last checkpoints.")
@service_options.as_json
def sweep(file: Path, server: str | None, local: bool, retry_failed: bool, as_json: bool) -> None:
    """Run the sweep that the YAML file FILE describes: its parameters, metric, trials, ranks and early stopping.

    `hvd-transformer sweep lr.yaml`

    Where a service runs, trials are its jobs; else they are launched here one after the other. The same command goes
    on with a sweep that was interrupted. The results are in its folder: results.csv, results.png, and a run directory
    per trial. The exit code is 1 if all trials failed or one was stopped.
    """
    from hvd_transformer.cli.main import show as show_error
    from hvd_transformer.cli.sweep_runners import check_launch_options, runner_of
    from hvd_transformer.sweep.definition import read_sweep
    from hvd_transformer.sweep.results import table, write_results
    from hvd_transformer.sweep.run import TrialStopped, run_sweep
    from hvd_transformer.sweep.sampling import all_values, check_optuna, corners
    from hvd_transformer.sweep.trials import Trial, Trials, alone_in

    chosen = read_sweep(file)
    check_launch_options(chosen, file)
    from hvd_transformer.sweep.checks import check_trial  # only now: it imports torch

    if chosen.method == "optuna":
        check_optuna()
    for values in corners(chosen) if chosen.method == "optuna" else all_values(chosen):
        check_trial(chosen, values, file)
    folder = Path(chosen.output_dir or f"runs/{file.stem}").expanduser()
    runner = runner_of(chosen, server, local=local, silent=as_json)

    def show(trial: Trial, max_steps: int | None) -> None:
        at = "" if max_steps is None else f" at step {trial.steps or max_steps}"
        result = "failed" if trial.failed else f"{chosen.metric} {trial.value:.6g}"
        values = " ".join(chosen.settings_of(trial.values)[len(chosen.settings) :])
        click.echo(f"{trial.name}{at}: {result}  ({values})", err=as_json)
        write_results(trials)

    with alone_in(folder, lambda line: click.echo(line, err=True)):
        trials = Trials(chosen, folder)
        if retry_failed:
            trials.forget_failures()
        try:
            run_sweep(trials, runner, show)
        except TrialStopped as error:
            show_error("hvd-transformer", error)
            sys.exit(error.code)
        write_results(trials)
    columns, rows = table(trials)
    if as_json:
        service_options.print_json({"trials": [dict(zip(columns, row, strict=True)) for row in rows]})
    else:
        from hvd_transformer.cli.service_tables import print_table

        print_table(columns, rows)
        click.echo(f"{folder}: results.csv, results.png")
    if all(trial.failed for trial in trials.all):
        sys.exit(1)
