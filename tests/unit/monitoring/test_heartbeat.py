"""What a rank is doing follows from its collectives, its timeline and its phase."""

import threading
import time
from types import SimpleNamespace

from small_job import settings, trainer

from hvd_transformer.monitoring.heartbeat import Heartbeat
from hvd_transformer.monitoring.timeline import Timeline
from hvd_transformer.reporting.progress import Silent
from hvd_transformer.reporting.trackers.processes import Trackers
from hvd_transformer.training.run_directory import RunDirectory
from hvd_transformer.training.session import Session


def in_a_step() -> Heartbeat:
    heartbeat = Heartbeat()
    heartbeat.link, heartbeat.timeline = SimpleNamespace(waiting={}, ended=0), Timeline(0, [])
    heartbeat.phase = "step"
    return heartbeat


def test_a_step_is_in_what_its_stages_and_collectives_are_in() -> None:
    heartbeat = in_a_step()
    assert heartbeat.link and heartbeat.timeline
    for name, phase in {"batches": "data", "forward 3": "forward", "weights 0": "backward", "update": "update"}.items():
        heartbeat.link.waiting["bucket.0"] = -1  # a watching thread of `profile`: this one works
        with heartbeat.timeline.span("stage 0", name):
            assert heartbeat.place() == (phase, None)
    heartbeat.link.waiting = {"bucket.4": threading.get_ident()}
    assert heartbeat.place() == ("allreduce", "bucket 4")
    heartbeat.link.waiting = {}
    assert heartbeat.place() == ("update", None)


def test_a_stage_may_wait_for_a_collective() -> None:
    """As for whole parameters, or in a layer that ranks share; if all stages do, the rank waits."""
    heartbeat = in_a_step()
    assert heartbeat.link and heartbeat.timeline
    with heartbeat.timeline.span("stage 0", "forward 3"):
        heartbeat.link.waiting["parameters.1"] = threading.get_ident()
        assert heartbeat.place() == ("forward", "parameters 1")
        heartbeat.timeline.now["stage 1"] = "weights 2", threading.get_ident() + 1  # another thread's
        assert heartbeat.place() == ("backward", None)
        heartbeat.link.waiting["parameters.2"] = threading.get_ident() + 1
        assert heartbeat.place() == ("forward", "parameters 1")


def test_on_a_gpu_autograds_threads_wait_for_backward() -> None:
    """They run its hooks, which send gradients and may wait; the span is of the thread that has called backward."""
    heartbeat = in_a_step()
    assert heartbeat.link and heartbeat.timeline
    heartbeat.backward_has_threads = True
    heartbeat.link.waiting = {"bucket.4": -1}
    with heartbeat.timeline.span("stage 0", "backward 3"):
        assert heartbeat.place() == ("backward", "bucket 4")
        heartbeat.timeline.now["stage 1"] = "forward 3", threading.get_ident() + 1
        assert heartbeat.place() == ("forward", None)  # this one works
        heartbeat.link.waiting = {}
        del heartbeat.timeline.now["stage 1"]
        assert heartbeat.place() == ("backward", None)
    heartbeat.link.waiting = {"bucket.4": -1}
    with heartbeat.timeline.span("stage 0", "forward 3"):
        assert heartbeat.place() == ("forward", None)


def test_outside_of_steps_its_own_word_counts() -> None:
    heartbeat = in_a_step()
    assert heartbeat.link and heartbeat.timeline
    heartbeat.enter_phase("evaluation")
    with heartbeat.timeline.span("stage 0", "forward 3"):
        assert heartbeat.place() == ("evaluation", None)
    heartbeat.link.waiting = {"evaluation": threading.get_ident()}
    assert heartbeat.place() == ("evaluation", "evaluation")
    assert Heartbeat().place() == ("start", None)


def test_whatever_ends_is_a_sign_of_progress() -> None:
    heartbeat = in_a_step()
    assert heartbeat.link and heartbeat.timeline
    signs = [heartbeat.signs()]
    with heartbeat.timeline.span("stage 0", "forward 0"):
        assert heartbeat.signs() == signs[0]
    signs.append(heartbeat.signs())
    heartbeat.link.ended += 1
    signs.append(heartbeat.signs())
    heartbeat.stepped(1, 2.0, 3.0)
    signs.append(heartbeat.signs())
    heartbeat.enter_phase("checkpoint")
    signs.append(heartbeat.signs())
    assert len(set(signs)) == 5


def test_a_step_after_a_checkpoint_counts_to_the_checkpoint(monkeypatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    heartbeat = Heartbeat()
    for seconds, end in [
        (50.0, lambda: heartbeat.stepped(1, 0.0, 0.0)),  # the first step belongs to the start
        (2.0, lambda: heartbeat.stepped(2, 0.0, 0.0)),
        (3.0, lambda: heartbeat.stepped(3, 0.0, 0.0)),
        (1.0, lambda: heartbeat.enter_phase("checkpoint")),
        (9.0, lambda: heartbeat.stepped(4, 0.0, 0.0)),
    ]:
        now += seconds
        end()
    now += 1000.0
    heartbeat.forgive(998.0)  # stopped and continued
    heartbeat.stepped(5, 0.0, 0.0)
    assert list(heartbeat.lasted["step"]) == [2.0, 3.0, 1.0, 2.0]
    assert list(heartbeat.lasted["checkpoint"]) == [9.0]


def test_a_real_step_passes_through_its_phases_and_reports_work() -> None:
    job = trainer(settings())
    job.prefetch.start = lambda *_: None  # no batches of a third step
    plans = job.steps()
    first, second = job.step(next(plans)), job.step(next(plans))
    assert all(0 < step.work <= step.seconds for step in (first, second))
    assert job.engine.timeline.now == {} and job.engine.timeline.ended == 2 * 4  # data, forward, backward, update


def test_a_session_tells_how_far_the_job_is_and_what_its_task_counts(tmp_path) -> None:
    job, heartbeat = trainer(settings(f"output_dir={tmp_path}")), Heartbeat()
    job.task.unit = "samples"
    session = Session(job, RunDirectory(job.config), Silent(), "digest", heartbeat, Trackers([]), {})
    session.saver.close()
    assert (heartbeat.step, heartbeat.total_steps, heartbeat.unit) == (0, job.total_steps, "samples")
