import ctypes
from types import SimpleNamespace
from unittest.mock import Mock

import torch

from hvd_transformer.comm.group import Group, Link
from hvd_transformer.comm.shared_buffers import SharedBuffers


def library(memory):
    """Horovod's, whose only buffer is this memory."""
    return SimpleNamespace(
        horovod_shared_buffer_allocate=Mock(return_value=memory and ctypes.addressof(memory)),
        horovod_shared_buffer_free=Mock(),
        horovod_shared_bytes_of_others=Mock(),
    )


def group(found, size=2):
    link = Link(None, "rank 0")
    link.shared_buffers = found
    return Group(link, range(size), 0)


def test_a_tensor_lies_in_the_memory_and_gives_it_back_with_its_last_view():
    memory = (ctypes.c_float * 6)()
    horovod = library(memory)
    tensor = group(SharedBuffers(horovod)).zeros_like(torch.ones(2, 3))
    assert tensor.shape == (2, 3) and tensor.dtype == torch.float32 and not tensor.any()
    horovod.horovod_shared_buffer_allocate.assert_called_once_with(24)
    tensor[1, 2] = 5
    assert memory[5] == 5
    row = tensor[1]
    del tensor
    horovod.horovod_shared_buffer_free.assert_not_called()
    del row
    horovod.horovod_shared_buffer_free.assert_called_once_with(ctypes.addressof(memory))


def test_a_system_without_such_memory_gives_plain_memory():
    horovod = library(None)
    tensor = SharedBuffers(horovod).zeros_like(torch.ones(3, dtype=torch.int64))
    assert tensor.tolist() == [0, 0, 0] and tensor.dtype == torch.int64
    del tensor
    horovod.horovod_shared_buffer_free.assert_not_called()


def test_nothing_is_allocated_for_one_rank_other_devices_and_no_elements():
    horovod = library(None)
    found = SharedBuffers(horovod)
    group(found, size=1).zeros_like(torch.ones(3))
    group(found).zeros_like(torch.ones(3, device="meta"))
    group(found).zeros_like(torch.ones(0))
    horovod.horovod_shared_buffer_allocate.assert_not_called()
    assert group(None).zeros_like(torch.ones(3)).tolist() == [0, 0, 0]


def test_published_horovod_has_none():
    published = ctypes.CDLL("libc.so.6")  # has no function of that name
    assert SharedBuffers.find(SimpleNamespace(mpi_ops=SimpleNamespace(_basics=SimpleNamespace()))) is None
    horovod = SimpleNamespace(mpi_ops=SimpleNamespace(_basics=SimpleNamespace(MPI_LIB_CTYPES=published)))
    assert SharedBuffers.find(horovod) is None
