"""Reduces the gradient buffers over the replicas, overlapped with backward.

    backward      | layer 4 | layer 3 | layer 2 | layer 1 |
    bucket 0                | ===== allreduce ===== |
    bucket 1                          | ===== allreduce ===== |
    bucket 2                                              | ===== |      `wait` returns after this one

Each buffer is sent as soon as the last backward of the step has filled it. A tied embedding's buffer is the exception:
its dense part is complete first and is sent alone; the rows of its lookups follow when backward ends
(`gradients.embedding_grads`).

Hooks run after autograd has accumulated a parameter's gradient (`register_post_accumulate_grad_hook`) and move the
step's first gradient into the buffer, where autograd adds the next ones: a gradient exists once. Linear layers
compute theirs right into the buffer (`gradients.weight_grads`).

ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054, section 5): in stages 1 and 2 a rank receives the sum of its shard
only; in stage 2, where it keeps no other gradients, every backward sends (`gradients.sharded_sync`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NoReturn

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hvd_transformer.comm.group import Group
from hvd_transformer.comm.streams import has_streams
from hvd_transformer.gradients.buffers import GradBuffer, ParamSlot, add
from hvd_transformer.gradients.embedding_grads import EmbeddingGrad, EmbeddingGradPlan
from hvd_transformer.gradients.wire.choice import make_wire
from hvd_transformer.gradients.wire.plain import Layout, Wire, WireOptions
from hvd_transformer.monitoring.timeline import Timeline


class GradSync:
    """One step: `begin_step`, any number of backwards with `expect_last_backward` before the last, `send_rest`, `wait`.

    Afterwards every buffer's `own_gradients` hold the sum over all backwards and all ranks of `group`.
    `compression` names the number format in transit (`gradients.wire`). `embeddings` names the parameters whose lookups
    give their gradient to `embedding_grads`; one whose rows are gathered needs a buffer alone. `stages` are the buffers
    of each pipeline stage; stages fill theirs side by side.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[GradBuffer]],
        group: Group,
        *,
        overlap: bool = True,
        compression: str = "none",
        wire_options: WireOptions | None = None,
        embeddings: Mapping[str, EmbeddingGradPlan] | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.buffers, self.group = list(chain.from_iterable(stages)), group
        self.timeline = timeline or Timeline(0, [])
        self.overlap = overlap and group.size > 1
        self.embedding_grads: dict[str, EmbeddingGrad] = {}
        self._index = {buffer: index for index, buffer in enumerate(self.buffers)}
        rows = [slot for buffer in self.buffers for slot in buffer.slots if slot.name in (embeddings or {})]
        self._of_rows_alone = {name for name, plan in (embeddings or {}).items() if plan.gather and not plan.dense}
        layouts = {
            _name(index): Layout(
                buffer.parameters, [slot for slot in buffer.slots if slot.name not in self._of_rows_alone]
            )
            for buffer, index in self._index.items()
        }
        layouts |= {_rows_name(slot): Layout(slot.parameter.data) for slot in rows}
        self.wire = self._shared_wire = make_wire(compression, group, layouts, wire_options)
        self._local_wire = Wire(group.alone(), layouts)
        # The order in which one micro-batch's backward fills them.
        self._order = list(chain.from_iterable(reversed(stages)))
        self._num_dense = {buffer: len(buffer.slots) for buffer in self.buffers}  # gradients that are not rows alone
        self._gathered: list[tuple[GradBuffer, ParamSlot, EmbeddingGrad]] = []
        self._added: dict[GradBuffer, list[tuple[ParamSlot, EmbeddingGrad]]] = {}  # before the buffer is sent
        self._sharded = self.buffers[0].shard.count > 1
        self._num_sent = dict.fromkeys(self.buffers, 0)  # in this step
        self._in_flight: dict[GradBuffer, Callable[[], Tensor]] = {}
        self._hooks: list[RemovableHandle] = []
        for buffer in self.buffers:
            for slot in buffer.slots:
                if embeddings is not None and slot.name in embeddings:
                    self._plan_rows(buffer, slot, embeddings[slot.name])
                store = partial(self._store_grad, buffer, slot)
                self._hooks.append(slot.parameter.register_post_accumulate_grad_hook(store))

    def close(self) -> None:
        """Let the parameters go: a hook keeps what it calls, and Python's collector does not see that."""
        for hook in self._hooks:
            hook.remove()

    def begin_step(self, num_backwards: int = 1, *, local: bool = False) -> None:
        """Forget the last step's gradients. `num_backwards`: this rank's micro-batches; ranks may differ.

        `local`: the sums are over this rank's backwards alone (`gradients.local_steps`).
        """
        self.wire = self._local_wire if local else self._shared_wire
        for buffer in self.buffers:
            buffer.begin_step()
            self._num_sent[buffer] = 0
        for embedding_grad in self.embedding_grads.values():
            embedding_grad.clear()
            embedding_grad.wire = self.wire

    def expect_last_backward(self, buffers: Sequence[GradBuffer]) -> None:
        """The next backward is the step's last one for these buffers: send each as soon as it is full.

        Pipeline stages may call this, and run their backwards, side by side.
        """
        if self.overlap:
            for buffer in buffers:
                buffer.missing = 0 if buffer in self._added else self._num_dense[buffer]

    def count_grad(self, buffer: GradBuffer, slot: ParamSlot) -> None:
        """This gradient of the last backward is in the buffer: send it if it is full."""
        buffer.missing -= 1
        if not buffer.missing:
            self._send(buffer)

    def check_unsent(self, buffer: GradBuffer, slot: ParamSlot) -> None:
        """Raise `RuntimeError` if this gradient comes too late, as the buffer has been sent without it."""
        if self._num_sent[buffer]:
            raise_used_again(slot)

    def send_rest(self) -> None:
        """Send what has not been sent: this rank's own work is then done, or queued on its GPUs."""
        for buffer in self._order:
            added = self._added.get(buffer, ())
            if not self._num_dense[buffer] and not added:  # gathered rows alone
                buffer.own_gradients.zero_()
                continue
            for slot, embedding_grad in added:
                embedding_grad.add(buffer.zeroed(slot))
            if added or not self._num_sent[buffer]:
                self._send(buffer)
        for _, _, embedding_grad in self._gathered:
            embedding_grad.send()

    def wait(self) -> None:
        """Return when every buffer holds the sum over the ranks."""
        self.wire.finish_sending()
        of_rows = {buffer for buffer, _, _ in self._gathered}
        for buffer in list(self._in_flight):  # the first one that was sent comes first
            self._arrive(buffer)
            if self._in_flight and buffer not in of_rows:
                buffer.norms()  # while the next one is in flight
        for buffer, slot, embedding_grad in self._gathered:
            own, width = buffer.own_part(slot.start, slot.stop), slot.parameter.size(1)
            matrix = buffer.own_gradients[own or slice(0)].view(-1, width)
            embedding_grad.add_gathered(matrix, first_row=buffer.own.start // width)
        self.wire.end_step()
        for buffer in self.buffers:
            buffer.drop_grads()

    def _plan_rows(self, buffer: GradBuffer, slot: ParamSlot, plan: EmbeddingGradPlan) -> None:
        parameter = slot.parameter
        grad = EmbeddingGrad(parameter, _rows_name(slot), self.wire, plan.gather)
        self.embedding_grads[slot.name] = grad
        self._num_dense[buffer] -= not plan.dense
        if plan.gather:
            self._gathered.append((buffer, slot, grad))
        else:
            self._added.setdefault(buffer, []).append((slot, grad))

    def _store_grad(self, buffer: GradBuffer, slot: ParamSlot, _: Tensor) -> None:
        self.check_unsent(buffer, slot)
        if slot.name in self._of_rows_alone:  # which nobody would add to the gathered rows
            raise RuntimeError(
                f"{slot.name}: a gradient came besides that of its lookups; where an embedding is tied, a module must "
                "have its weight, such as nn.Linear (`output.weight = embedding.weight`)"
            )
        buffer.store_grad(slot)
        if buffer.missing:
            self.count_grad(buffer, slot)

    def _send(self, buffer: GradBuffer) -> None:
        index, gradients = self._index[buffer], buffer.close()
        if self._sharded:
            kind, sent = "reduce-scatter", self.wire.reduce_scatter_async(gradients, _name(index))
        else:
            kind, sent = "allreduce", self.wire.all_reduce_async(gradients, _name(index))
        size = f"{sent.nbytes / 2**20:.1f} MiB"
        # On a GPU another thread has another stream.
        aside = not has_streams(gradients.device)
        self._in_flight[buffer] = self.timeline.watch(f"{kind} bucket {index}", size, sent.wait, aside=aside)
        self._num_sent[buffer] += 1

    def _arrive(self, buffer: GradBuffer) -> None:
        found, own = self._in_flight.pop(buffer)(), buffer.own_gradients
        if not found.is_set_to(own):
            add(own, found, first=self._num_sent[buffer] == 1)


def _name(index: int) -> str:
    return f"bucket.{index}"


def _rows_name(slot: ParamSlot) -> str:
    return f"rows.{slot.name}"


def raise_used_again(slot: ParamSlot) -> NoReturn:
    """Say that this gradient came when its buffer had been sent."""
    raise RuntimeError(
        f"{slot.name}: a gradient came after its bucket was sent, as this layer, or another one of the bucket, is "
        "called more than once in one `Layer` of the task; make each call a `Layer` of its own"
    )
