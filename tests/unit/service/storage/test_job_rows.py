"""Jobs as rows: whole, and found by page at the same cost anywhere in a long list."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from new_jobs import new_job

from hvd_transformer.service.jobs import ID, WAITING, Engine, Job, Needs, State
from hvd_transformer.service.storage import job_rows
from hvd_transformer.service.storage.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "service.db")
    yield store
    store.close()


def test_a_job_comes_back_as_it_was_submitted(store: Store) -> None:
    """Its id is written into its run directory, and into no other text with braces."""
    (number,) = store.add_jobs(
        [
            new_job(
                "small",
                priority=5,
                needs=Needs(8, 4, 2, 3),
                launch=("--timeline", "t.json"),
                words=(f"data.source=/texts/{ID}", f"output_dir=/runs/small-{ID}"),
                config={"lr": 1e-3, "files": ["é", ID], "none": None, "output_dir": f"/runs/small-{ID}"},
                code="abc",
                env_names=("TOKEN",),
                env_file="/home/ann/.env",
                tags=("seed=1", "first", "first"),
                time_limit=60.5,
                max_retries=0,
                held=True,
            )
        ]
    )
    assert store.job(number) == Job(
        id=number,
        name="small",
        owner="ann",
        state=State.HELD,
        priority=5,
        submitted=1000.0,
        needs=Needs(8, 4, 2, 3),
        output_dir=f"/runs/small-{number}",
        folder="/home/ann",
        words=(f"data.source=/texts/{ID}", f"output_dir=/runs/small-{number}"),
        launch=("--timeline", "t.json"),
        config={"lr": 1e-3, "files": ["é", ID], "none": None, "output_dir": f"/runs/small-{number}"},
        code="abc",
        env_names=("TOKEN",),
        env_file="/home/ann/.env",
        tags=("first", "seed=1"),
        time_limit=60.5,
        max_retries=0,
    )
    assert store.job(number + 1) is None


def test_an_array_is_named_by_its_first_job(store: Store) -> None:
    store.add_jobs([new_job()])
    array = [new_job(f"j{n}", array=True, output_dir=f"/runs/sweep-{ID}/{n}") for n in range(3)]
    ids = store.add_jobs(array)
    jobs = store.jobs(after_id=1)
    assert [job.id for job in jobs] == ids == [2, 3, 4]
    assert {job.array for job in jobs} == {2}
    assert [job.output_dir for job in jobs] == ["/runs/sweep-2/0", "/runs/sweep-2/1", "/runs/sweep-2/2"]
    assert store.jobs(limit=1)[0].array is None


def test_pages_hold_what_a_search_of_all_jobs_finds(store: Store) -> None:
    random = Random(7)
    owners, tags, states = ("ann", "ben", "cid"), ("a", "b", "c"), sorted(WAITING | {State.CANCELLED})
    for number in range(120):
        store.add_jobs(
            [
                new_job(
                    f"j{number}",
                    owner=random.choice(owners),
                    tags=tuple(random.sample(tags, random.randrange(3))),
                    held=random.random() < 0.3,
                )
            ]
        )
        if random.random() < 0.3:
            store.update(number + 1, state=State.CANCELLED, ended=2000.0)
    everything = store.jobs()
    assert [job.id for job in everything] == list(range(1, 121))
    for _ in range(200):
        wanted = random.choice([None, random.sample(states, random.randrange(4))])
        owner, tag = random.choice([None, *owners]), random.choice([None, *tags])
        newest_first, limit = random.random() < 0.5, random.randrange(1, 20)
        found = [
            job
            for job in everything[:: -1 if newest_first else 1]
            if (wanted is None or job.state in wanted)
            and (owner is None or job.owner == owner)
            and (tag is None or tag in job.tags)
        ]
        pages: list[Job] = []
        while page := store.jobs(wanted, owner, tag, pages[-1].id if pages else None, limit, newest_first):
            assert len(page) <= limit
            pages += page
        assert pages == found


@pytest.mark.parametrize(
    "search",
    [
        {},
        {"states": [State.QUEUED, State.CANCELLED]},
        {"owner": "ann"},
        {"owner": "ann", "states": [State.QUEUED]},
        {"tag": "even"},
        {"tag": "even", "owner": "ann", "states": [State.QUEUED]},
        {"engine": Engine.HOSTS, "states": [State.QUEUED, State.CANCELLED]},
    ],
)
@pytest.mark.parametrize("newest_first", [False, True])
def test_a_page_costs_the_same_anywhere_in_the_list(
    store: Store, search: dict[str, object], newest_first: bool
) -> None:
    jobs = [new_job(f"j{number}", tags=("even",) if number % 2 else ()) for number in range(2000)]
    store.add_jobs(jobs)
    every = {"states": None, "owner": None, "tag": None, "engine": None, **search}

    def cost(after_id: int) -> int:
        steps = 0

        def step() -> None:
            nonlocal steps
            steps += 1

        with store.database.read() as connection:
            connection.set_progress_handler(step, 1)
            page = job_rows.page(connection, **every, after_id=after_id, limit=10, newest_first=newest_first)
            connection.set_progress_handler(None, 1)
        assert len(page) == 10
        return steps

    costs = [cost(after_id) for after_id in (50, 1000, 1950)]
    assert max(costs) < 1.2 * min(costs)
    assert max(costs) < 3000  # of 2,000 jobs
