"""No contestant of a benchmark has a help that another lacks."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks import data_parallel, pipeline, sharded, tensor_parallel
from benchmarks.group import Contestant
from benchmarks.launching import worker
from benchmarks.settings import ENVIRONMENT, PEER_VARIANTS, Peer

ALL = {
    "data_parallel": data_parallel.contestants((), list(PEER_VARIANTS)),
    "pipeline": pipeline.contestants(),
    "tensor_parallel": tensor_parallel.contestants(),
    "sharded": sharded.contestants(),
}


@pytest.mark.parametrize("name", ALL)
def test_all_get_the_same_environment_and_block(name: str) -> None:
    contestants: Sequence[Contestant] = ALL[name]
    assert all(contestant.environment == ENVIRONMENT and contestant.steps is None for contestant in contestants)
    assert len({contestant.name for contestant in contestants}) == len(contestants)


def test_no_two_peers_are_one_in_a_table() -> None:
    hooks = [Peer(hook="fp16"), *(Peer(hook="powersgd", rank=rank) for rank in (1, 2, 4))]
    assert len({str(peer) for peer in (*PEER_VARIANTS, *hooks)}) == len(PEER_VARIANTS) + len(hooks)


def test_a_rank_learns_what_its_peer_chose() -> None:
    peer = replace(PEER_VARIANTS[0], plain=True, bucket_mb=3, hook="powersgd", rank=4)
    words = worker("ddp", "seed=2", peer=peer)
    chosen = Peer(**json.loads(words[words.index("--peer") + 1]))
    assert chosen == peer and words[-3:] == ["ddp", "SOCKET", "seed=2"]
