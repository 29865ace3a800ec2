"""Deferred initialization: a model is built without memory, and its weights are filled one after the other.

While `DeferredInit` is active, `torch.empty`, from which torch.nn makes its weights, returns tensors on the meta
device, and the in-place operations that fill them are recorded. `materialize` runs these in their order, so that
torch's generator gives each weight the values that it would have without this:

    recorded        a.uniform_()  b.uniform_()  a.normal_()  b.mul_(0.5)
    whole weights   (dropped)     b             b, a         b
    kept                                        piece of a   piece of b

The idea is that of torchdistX's `deferred_init`.
"""

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from inspect import getattr_static
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import swap_tensors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

log = logging.getLogger("hvd_transformer")
aten = torch.ops.aten

# How torch calls the getters of a tensor.
_DEVICE, _IS_META = (getattr_static(Tensor, name).__get__ for name in ("device", "is_meta"))
# They write all values and read none, so the values before do not matter.
_FILLS = {aten.uniform_.default, aten.normal_.default, aten.fill_.Scalar, aten.zero_.default}
# From a weight's name and its whole tensor to a view of what this rank keeps of it.
Keep = Callable[[str, Tensor], Tensor]


class CannotDefer(RuntimeError):
    """Raised if building the model reads values, or draws random numbers in an order that cannot be repeated."""


class _Call(NamedTuple):
    """An in-place operation on a view of a deferred tensor, which `storage` identifies."""

    function: Callable[..., object]
    storage: int
    view: tuple[torch.Size, tuple[int, ...], int]  # the arguments of `as_strided`
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    fills: bool  # the whole tensor

    def run(self, whole: Tensor) -> None:
        self.function(whole.as_strided(*self.view), *self.arguments, **self.options)


class DeferredInit(TorchDispatchMode):
    """The record of one model. Raises `CannotDefer` inside the context for what cannot be repeated later."""

    def __init__(self) -> None:
        self._bases: dict[int, Tensor] = {}  # on the meta device, by storage: what `torch.empty` returned
        self._calls: list[_Call] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler, which takes seconds

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        options = options or {}
        if function is aten.empty.memory_format and _is_usual(**options):
            base: Tensor = function(*arguments, **{**options, "device": torch.device("meta")})
            self._bases[_storage(base)] = base
            return base
        tensors = [leaf for leaf in tree_leaves((arguments, options)) if isinstance(leaf, Tensor)]
        if any(map(self._is_deferred, tensors)):
            if not function.is_view:
                return self._record(function, tensors, arguments, options)
        elif torch.Tag.nondeterministic_seeded in function.tags:
            raise CannotDefer(f"{function} draws between the weights")
        return function(*arguments, **options)

    def _record(
        self, function: Any, tensors: list[Tensor], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Tensor:
        if not function._schema.is_mutable or len(tensors) != 1 or arguments[0] is not tensors[0]:
            raise CannotDefer(f"{function} uses the values of a weight")
        (target,) = tensors
        view = target.size(), target.stride(), int(target.storage_offset())
        storage = _storage(target)
        fills = function in _FILLS and target.nbytes == self._bases[storage].nbytes
        self._calls.append(_Call(function, storage, view, arguments[1:], options, fills))
        return target  # without a call: torch's functions for the meta device take long to import

    def _is_deferred(self, tensor: Tensor) -> bool:
        return tensor.is_meta and _storage(tensor) in self._bases

    def check(self, model: nn.Module) -> None:
        """Raise `CannotDefer` if the model has other tensors without values than parameters of their own."""
        own = {id(weight) for weight in model.parameters()}
        for module in model.modules():
            for name, value in [*module._buffers.items(), *vars(module).items()]:
                for tensor in tree_leaves(value):  # also in lists
                    if isinstance(tensor, Tensor) and id(tensor) not in own and self._is_deferred(tensor):
                        raise CannotDefer(f"{type(module).__name__}.{name} is not a parameter")
        deferred = {name: weight for name, weight in model.named_parameters() if self._is_deferred(weight)}
        memories = Counter(map(_storage, deferred.values()))
        for name, weight in deferred.items():
            base = self._bases[_storage(weight)]
            if weight.shape != base.shape or memories[_storage(weight)] > 1:
                raise CannotDefer(f"{name} shares its memory")
            if weakref.getweakrefcount(weight):
                raise CannotDefer(f"{name} has weak references, which torch does not move")

    @torch.no_grad()
    def materialize(self, model: nn.Module, keep: Keep, *, draw: bool = True) -> None:
        """Give each parameter what `keep` returns for its name and its whole initial tensor; tied ones stay tied.

        Few weights exist whole at a time. Without `draw` deferred parameters are zero.
        """
        deferred: dict[int, tuple[str, nn.Parameter]] = {}
        for name, weight in model.named_parameters():
            if self._is_deferred(weight):
                deferred[_storage(weight)] = name, weight
            elif (own := keep(name, weight.data)).shape != weight.shape:
                weight.data = own.clone(memory_format=torch.contiguous_format)
        # All at once, before the short-lived whole tensors: between these they would spread over the heap.
        for name, weight in deferred.values():
            shape = keep(name, torch.zeros(()).expand(weight.shape)).shape
            _fill(weight, (torch.empty if draw else torch.zeros)(shape, dtype=weight.dtype))
        if draw:
            self._draw(deferred, keep)

    def _draw(self, deferred: Mapping[int, tuple[str, nn.Parameter]], keep: Keep) -> None:
        wholes: dict[int, Tensor] = {}
        for call, following in zip(self._calls, self._following(), strict=True):
            base = self._bases[call.storage]
            name, weight = deferred.get(call.storage, ("", None))  # None: replaced, as by a tied weight
            if weight is not None and weight.shape == base.shape:
                call.run(weight.data)
                continue
            whole = wholes.pop(call.storage, None)
            if whole is None:
                whole = torch.empty(base.shape, dtype=base.dtype)
            call.run(whole)
            if following is None and weight is not None:
                weight.copy_(keep(name, whole))
            elif following is not None and not following.fills:
                wholes[call.storage] = whole

    def _following(self) -> list[_Call | None]:
        """Return, for each call, the next one on the same tensor."""
        later: dict[int, _Call] = {}
        found = []
        for call in reversed(self._calls):
            found.append(later.get(call.storage))
            later[call.storage] = call
        return found[::-1]


def _is_usual(device: torch.device | None = None, memory_format: object = None, **_: object) -> bool:
    """Whether `torch.empty` with these options makes a contiguous tensor on the CPU."""
    return memory_format is None and (device is None or device.type == "cpu")


def _storage(tensor: Tensor) -> int:
    """A key that is equal for views of the same memory, also on the meta device."""
    return int(tensor.untyped_storage()._cdata)


def _fill(weight: nn.Parameter, values: Tensor) -> None:
    filled = nn.Parameter(values, weight.requires_grad)
    vars(filled).update(vars(weight))
    swap_tensors(weight, filled)


class _SeemsOnCpu(TorchFunctionMode):
    """Hides the meta device, on which functions of `torch.nn.init` would do nothing."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        result = function(*arguments, **(options or {}))
        if function == _IS_META:
            return False
        return torch.device("cpu") if function == _DEVICE and result.type == "meta" else result


def deferred_init(make_model: Callable[[], nn.Module]) -> tuple[nn.Module, DeferredInit]:
    """Build a model whose parameters have no values until `materialize`.

    A model that does not support this is built as usual, with nothing deferred.
    """
    init = DeferredInit()
    try:
        with _SeemsOnCpu(), init:
            model = make_model()
        init.check(model)
        return model, init
    except Exception as error:  # a model that is wrong in itself fails again below
        log.info("the weights are initialized whole on every rank: %s", error)
    return make_model(), DeferredInit()
