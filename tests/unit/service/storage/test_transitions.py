"""Every pair of states, as State describes them."""

from itertools import product

import pytest

from hvd_transformer.errors import UserError
from hvd_transformer.service.jobs import State
from hvd_transformer.service.storage.transitions import check_transition

ALLOWED = """
HELD QUEUED, HELD CANCELLED
QUEUED HELD, QUEUED STARTING, QUEUED CANCELLED
STARTING RUNNING, STARTING STOPPING, STARTING SUCCEEDED, STARTING FAILED, STARTING QUEUED
RUNNING STOPPING, RUNNING SUCCEEDED, RUNNING FAILED, RUNNING QUEUED
STOPPING CANCELLED, STOPPING QUEUED, STOPPING HELD, STOPPING FAILED, STOPPING SUCCEEDED
FAILED QUEUED, CANCELLED QUEUED
"""


def test_every_pair() -> None:
    allowed = {tuple(pair.split()) for line in ALLOWED.split("\n") for pair in line.split(",")}
    for old, new in product(State, State):
        if old is new or (old.value, new.value) in allowed:
            check_transition(7, old, new)
        else:
            with pytest.raises(UserError, match=f"^job 7 is {old.value}: it cannot become {new.value}, only "):
                check_transition(7, old, new)


def test_the_message_says_what_is_possible() -> None:
    with pytest.raises(UserError, match="^job 7 is QUEUED: it cannot become FAILED, only HELD, STARTING, CANCELLED$"):
        check_transition(7, State.QUEUED, State.FAILED)
    with pytest.raises(UserError, match="^job 7 is SUCCEEDED: it cannot become QUEUED, only nothing else$"):
        check_transition(7, State.SUCCEEDED, State.QUEUED)
