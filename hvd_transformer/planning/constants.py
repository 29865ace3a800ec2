"""The constants of a machine that `plan --scale` computes with: `hvd-transformer bench` measures and writes them.

Those of known devices, from published figures, are in `devices/*.yaml`. No torch.
"""

import math
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hvd_transformer import atomic
from hvd_transformer.errors import UserError

FORMAT: Literal[1] = 1
MEASURED = Path("~/.cache/hvd-transformer/constants.yaml")  # what `bench` measured on this machine
DEVICES = resources.files("hvd_transformer.planning") / "devices"

Backend = Literal["gloo", "mpi", "nccl"]
Scope = Literal["host", "network"]  # between ranks of one host, or between hosts
Precision = Literal["fp32", "bf16", "fp16", "fp64"]
_Value = TypeVar("_Value")

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Link(_Table):
    """A link as a collective of one backend uses it."""

    latency: NotNegative = Field(description="seconds per message: half of an allreduce of 1 KB between two ranks")
    bandwidth: Positive = Field(
        description="bytes per second in one direction, as reached by a large allreduce (bus bandwidth of NCCL's "
        "tests: 2 (P - 1) / P x bytes / seconds); within a host: of one rank; between hosts: of a whole host"
    )
    cpu_seconds_per_byte: NotNegative = Field(
        0.0, description="seconds that a rank cannot compute per byte that it sends; 0 on a GPU"
    )
    overhead: NotNegative = Field(0.0, description="seconds per collective, however many ranks take part")


class Constants(_Table):
    """What one device of a machine, and the links between its devices, can do. SI units: seconds, bytes, FLOP/s."""

    version: Literal[1] = Field(FORMAT, description="of this format")
    device: str = Field(min_length=1, description="name of the device; of a CPU also how many threads a rank has")
    origin: str = Field("", description="where the figures come from: date of the measurement, or publications")
    gpu_names: tuple[str, ...] | None = Field(
        None, description="of published figures: parts of the names that these GPUs give themselves"
    )
    threads: int = Field(1, ge=1, description="threads of a rank, on a CPU")
    devices_per_host: int = Field(1, ge=1, description="ranks that fit on a host: its GPUs, or its cores / threads")
    matmul: Mapping[Precision, Mapping[Annotated[int, Field(ge=1)], Positive]] = Field(
        min_length=1,
        description="FLOP/s of a matrix product by precision and by side: the cube root of rows x inner x columns",
    )
    memory_bandwidth: Positive = Field(description="bytes per second that one device reads and writes")
    memory_bytes: int = Field(ge=1, description="memory of one device; of a CPU: of its host / devices_per_host")
    training_fraction: Mapping[Precision, Annotated[float, Field(gt=0, le=1)]] = Field(
        default_factory=dict,  # until `bench train` has run
        description="fraction of `matmul` that forward and backward reach: FLOPs of their matrix products (without "
        "recomputing) / seconds of both on one device without communication / matmul_rate(side of the step)",
    )
    crowding: Annotated[float, Field(ge=1)] = Field(
        1.0, description="seconds of a step while all devices of a host compute / while only one does"
    )
    layer_seconds: NotNegative = Field(
        0.0, description="seconds of a layer's forward and backward per micro-batch that do not depend on its size"
    )
    optimizer_seconds: NotNegative | None = Field(
        None, description="seconds per parameter of clip and update; none: 36 bytes per parameter / memory_bandwidth"
    )
    step_seconds: NotNegative = Field(0.0, description="seconds of a step that do not depend on the model's size")
    jitter: NotNegative = Field(0.0, description="standard deviation of a rank's step time / its mean")
    links: Mapping[Backend, Mapping[Scope, Link]] = Field(
        default_factory=dict,  # until `bench allreduce` has run
        description="by backend and scope",
    )
    price_per_hour: Positive | None = Field(None, description="price of one device-hour, in any currency")

    def matmul_rate(self, precision: Precision, side: float) -> float:
        """FLOP/s of a matrix product of this side: linear between the logarithms of the measured sides, else the
        nearest one's. Raises `UserError` if the precision was not measured."""
        rates = sorted(self._known(self.matmul, precision, "matmul").items())
        below = [(known, rate) for known, rate in rates if known <= side]
        above = [(known, rate) for known, rate in rates if known > side]
        if not below or not above:
            return below[-1][1] if below else above[0][1]
        (first, low), (last, high) = below[-1], above[0]
        return low + (high - low) * math.log(side / first) / math.log(last / first)

    def fastest_matmul(self, precision: Precision) -> tuple[int, float]:
        """The side and the FLOP/s of the fastest matrix product. Raises `UserError` like `matmul_rate`."""
        return max(self._known(self.matmul, precision, "matmul").items(), key=lambda item: item[1])

    def training_rate(self, precision: Precision, side: float) -> float:
        """FLOP/s of forward and backward whose typical product has this side. Raises `UserError` like `matmul_rate`."""
        fraction = self._known(self.training_fraction, precision, "training_fraction")
        return fraction * self.matmul_rate(precision, side)

    def backend(self, wanted: Backend | None) -> Backend:
        """The backend that is wanted, or the first one. Raises `UserError` if the constants have no link of it."""
        if not self.links:
            raise UserError(f"constants of {self.device}: links is missing; run `hvd-transformer bench allreduce`")
        if wanted is None:
            return next(iter(self.links))
        if wanted not in self.links:
            raise UserError(f"--backend {wanted}: no constants of {self.device}; known: {', '.join(self.links)}")
        return wanted

    def link(self, backend: Backend, scope: Scope) -> Link:
        """A link of a backend that the constants have. Raises `UserError` if they do not have this one."""
        if scope not in self.links[backend]:
            where = "within a host" if scope == "host" else "between hosts"
            raise UserError(f"constants of {self.device}: links.{backend}.{scope} is missing: its link {where}")
        return self.links[backend][scope]

    def _known(self, table: Mapping[Precision, _Value], precision: Precision, key: str) -> _Value:
        if precision not in table:
            raise UserError(
                f"training.precision={precision}: constants of {self.device} have no {key}.{precision}; "
                f"known: {', '.join(table) or 'none; run `hvd-transformer bench train`'}"
            )
        return table[precision]


def step_side(tokens: int, d_model: int) -> float:
    """The side of a step's typical matrix product, [tokens, d_model] @ [d_model, d_model].

    `tokens`: of one micro-batch.
    """
    return math.exp(math.log(tokens * d_model * d_model) / 3)


def device_names() -> list[str]:
    """The built-in constants that `--constants` accepts by name."""
    return sorted(item.name.removesuffix(".yaml") for item in DEVICES.iterdir() if item.name.endswith(".yaml"))


def load(chosen: str | None = None) -> Constants:
    """Built-in constants by name, or those of a file; None: what `bench` measured on this machine.

    Raises `UserError` if there are none, or they are invalid.
    """
    if chosen is None:
        file = MEASURED.expanduser()
        if not file.exists():
            raise UserError(
                f"--scale: {file} does not exist: run `hvd-transformer bench` to measure this machine, or give "
                f"--constants with a file or one of {', '.join(device_names())}"
            )
    elif chosen in device_names():
        return _parsed((DEVICES / f"{chosen}.yaml").read_text(encoding="utf-8"), f"--constants {chosen}")
    else:
        file = Path(chosen)
    try:
        return _parsed(file.read_text(encoding="utf-8"), str(file))
    except FileNotFoundError:
        raise UserError(
            f"--constants {chosen}: no such file, nor the name of built-in constants: {', '.join(device_names())}"
        ) from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not valid UTF-8 at byte {error.start}") from None


def save(constants: Constants, file: Path) -> None:
    """Write the constants as YAML, atomically; `load` reads them again. Raises `UserError` if that fails."""
    text = yaml.safe_dump(constants.model_dump(mode="json", exclude_none=True), sort_keys=False, allow_unicode=True)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(file, f"# Read by `hvd-transformer plan --scale`.\n{text}")
    except OSError as error:
        raise UserError(f"{file}: cannot be written: {error.strerror}") from None


def _parsed(text: str, origin: str) -> Constants:
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"{origin}: not valid YAML: {problem}") from None
    if not isinstance(content, dict):
        raise UserError(f"{origin}: must contain keys and values, such as 'device: H100'")
    if (version := content.get("version")) != FORMAT:
        raise UserError(f"{origin}: version={version}: must be {FORMAT}; run `hvd-transformer bench` again")
    try:
        return Constants.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"] if part != "[key]")
        if first["type"] == "missing":
            raise UserError(f"{origin}: {key} is missing") from None
        if first["type"] == "extra_forbidden":
            raise UserError(f"{origin}: {key}: unknown key") from None
        message = first["msg"]
        wanted = message.partition(" should ")[2].partition(", unable")[0]
        raise UserError(f"{origin}: {key}={first['input']!r}: {f'must {wanted}' if wanted else message}") from None
