"""Layouts of a small language model: memory and FLOPs are those of `plan`, the fastest that fits is recommended."""

import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from small_plan import SMALL, V

from hvd_transformer.cli import main as cli
from hvd_transformer.cli.plan import plan as command
from hvd_transformer.config import load
from hvd_transformer.errors import UserError
from hvd_transformer.planning.constants import load as load_constants
from hvd_transformer.planning.constants import save
from hvd_transformer.planning.memory_plan import make_plan
from hvd_transformer.planning.scaling.layer_work import ModelWork
from hvd_transformer.planning.scaling.layout import Layout, Machine
from hvd_transformer.planning.scaling.layout_memory import layout_memory
from hvd_transformer.planning.scaling.measure_work import measure_work
from hvd_transformer.planning.scaling.search import _has_work, layouts, search

H100 = Machine(load_constants("h100"), "nccl", 8)


@cache
def work(*words: str) -> ModelWork:
    return measure_work(load(overrides=[*SMALL, *words]), V, 8)


@pytest.mark.parametrize("tensor", [2, 4])
def test_layers_are_those_of_plan_for_every_tensor_degree(tensor: int) -> None:
    # Measured for 1 and 2: 4 is concluded.
    plan = make_plan(load(overrides=[*SMALL, f"parallel.tensor={tensor}"]), V)
    for own, layer in zip(work().at(tensor, 6), plan.layers, strict=True):
        assert (own.name, own.forward_flops, own.backward_flops, own.deferred_flops) == (
            layer.name,
            pytest.approx(layer.forward_flops),
            pytest.approx(layer.backward_flops),
            pytest.approx(layer.deferred_flops),
        )
        assert own.parameters == pytest.approx(layer.parameters)
        assert own.activations == pytest.approx(layer.activation_bytes)


def test_sums_of_a_block_over_its_tensor_group() -> None:
    embedding, block, *_, head = work().at(2, 6)
    # Two forward and two backward, each of tokens × width: Megatron-LM, figure 4.
    assert block.forward_sums == block.backward_sums == [6 * 10 * 24] * 2
    assert not embedding.forward_sums and not head.forward_sums
    assert not embedding.beside_sums and not head.beside_sums
    words = ["parallel.tensor=2", "parallel.vocab_parallel=true"]
    split = work(*words).at(2, 6)
    assert split[0].forward_sums == split[-1].forward_sums == [6 * 10 * 24]


@pytest.mark.parametrize("tensor", [2, 4])
def test_beside_a_sum_of_backward_is_the_weight_gradient_of_the_layer_that_starts_it(tensor: int) -> None:
    block = work().at(tensor, 6)[1]
    attention, feedforward = (24 * width / tensor for width in (3 * 24, 40))  # weights of a rank
    assert block.beside_sums == pytest.approx([2 * 6 * 10 * attention, 2 * 6 * 10 * feedforward])
    assert sum(block.beside_sums) < block.deferred_flops


def test_tied_embedding_belongs_to_the_head() -> None:
    embedding, *_, head = work().whole
    assert embedding.weights == [] and head.weights[0][:3] == (V * 24, 24, True)
    untied = work("model.tie_embeddings=false").whole[0].weights
    assert untied[0][:3] == (V * 24, 24, False)


@pytest.mark.parametrize(
    ("words", "stages", "micro_batches", "tolerance"),
    [
        ([], 1, 1, 0.02),
        (["parallel.recompute=always"], 1, 1, 0.02),
        (["parallel.optimizer_shard=gradients"], 1, 1, 0.02),
        (["parallel.schedule=zero_bubble"], 2, 6, 0.1),
        (["training.precision=bf16"], 1, 1, 0.001),
        (["optimizer.name=muon"], 1, 1, 0.001),
    ],
)
def test_memory_is_that_of_plan(words: list[str], stages: int, micro_batches: int, tolerance: float) -> None:
    keys = [*words, f"parallel.pipeline={stages}", f"parallel.micro_batches={micro_batches}"]
    config = load(overrides=[*SMALL, *keys])
    plan = make_plan(config, V, 4)
    layout = Layout(4, 1, stages, micro_batches, 6 // micro_batches)
    starts = [0]
    for stage in plan.stages:
        starts.append(starts[-1] + len(stage.layers))
    layers = work(*words).at(1, layout.micro_batch_size)
    found = layout_memory(layers, list(pairwise(starts)), config, layout, "cpu")
    assert found == [pytest.approx(sum(plan.memory(stage)), rel=tolerance) for stage in plan.stages]


def test_layouts_keep_a_replica_on_a_host_and_split_what_can_be_split() -> None:
    config = load(overrides=SMALL)
    found = list(layouts(work(), config, H100, 64))
    assert {(layout.tp, layout.pp) for layout in found} == {
        (1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2),
    }  # fmt: skip  # 4 heads; 5 layers, so no 8 stages
    assert all(layout.devices == 64 for layout in found)
    assert {layout.micro_batches for layout in found if layout.pp == 1} == {1}
    assert {layout.micro_batches * layout.micro_batch_size for layout in found} == {6}
    few = layouts(work(), load(overrides=[*SMALL, "training.global_batch_size=12"]), H100, 64)
    assert {layout.dp for layout in few} == {8}  # no more replicas than samples


def test_strong_scaling_keeps_the_samples_of_a_step() -> None:
    config = load(overrides=[*SMALL, "training.global_batch_size=96"])
    for devices in (1, 8, 64):
        found = search(work(), config, H100, devices, 80 * 2**30)
        assert {candidate.global_batch for candidate in found.candidates} == {96}
    layout = next(layout for layout in layouts(work(), config, H100, 8) if layout.dp == 8)
    assert (layout.accumulation, layout.micro_batches * layout.micro_batch_size) == (2, 6)


def test_the_fastest_that_fits_is_best_and_memory_is_named_where_it_rules_out_a_faster_one() -> None:
    config = load(overrides=SMALL)
    roomy = search(work(), config, H100, 8, 80 * 2**30)
    assert roomy.best is roomy.candidates[0] and roomy.bound != "memory"
    rates = [candidate.tokens_per_second for candidate in roomy.candidates]
    assert rates == sorted(rates, reverse=True)
    small = min(candidate.memory for candidate in roomy.candidates)
    tight = search(work(), config, H100, 8, small / 0.9 + 1)
    assert tight.best is not None and tight.best.memory == small and tight.bound == "memory"
    none = search(work(), config, H100, 8, 1000)
    assert none.best is None and none.bound == "memory"


def test_command() -> None:
    words = [*SMALL, "--vocab-size", f"{V}", "--scale", "1,8,4096", "--constants", "h100"]
    done = CliRunner().invoke(command, words, catch_exceptions=False)
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert max(map(len, lines)) <= 120 and "\x1b" not in done.output
    assert sum(" * " in line for line in lines) == 3
    assert "4096 devices: -np " in done.output
    none = CliRunner().invoke(command, [*words, "--memory-gib", "0.00001"], catch_exceptions=False)
    assert none.output.count("no layout fits") == 3


def test_memory_is_that_of_the_device_planned_for_wherever_the_command_runs(tmp_path: Path) -> None:
    large = [*SMALL, "model.num_layers=1", "model.dropout=0.1", "training.batch_size=60000", "model.loss_chunk=600000"]

    def output(constants: str, device: str) -> str:
        words = [*large, "--vocab-size", f"{V}", "--scale", "1", "--constants", constants, "--devices-per-host", "1"]
        return CliRunner().invoke(command, [*words, f"training.device={device}"], catch_exceptions=False).output

    assert output("h100", "auto") == output("h100", "cuda")
    over_gloo = tmp_path / "gloo.yaml"
    save(H100.constants.model_copy(update={"links": {"gloo": H100.constants.links["nccl"]}}), over_gloo)
    assert output(str(over_gloo), "auto") == output(str(over_gloo), "cpu") != output("h100", "auto")


def test_a_cpu_is_refused_with_the_constants_of_gpus() -> None:
    words = [*SMALL, "--vocab-size", f"{V}", "--scale", "1", "--constants", "h100", "training.device=cpu"]
    with pytest.raises(UserError) as caught:
        CliRunner().invoke(command, words, catch_exceptions=False)
    assert str(caught.value).startswith("training.device=cpu: the constants of NVIDIA H100")
    assert str(caught.value).endswith(" are for GPUs; leave the key out")


def test_price_of_tokens(tmp_path: Path) -> None:
    file = tmp_path / "priced.yaml"
    save(H100.constants.model_copy(update={"price_per_hour": 36.0}), file)
    words = [*SMALL, "--vocab-size", f"{V}", "--scale", "1", "--constants", str(file)]
    row = (
        CliRunner().invoke(command, words, catch_exceptions=False).output.split("bound by\n")[1].splitlines()[0].split()
    )
    rate, price = (float(row[place].replace(",", "")) for place in (7, 10))
    assert price == pytest.approx(1e9 / rate / 3600 * 36, abs=0.01, rel=1e-3)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--scale", "8,x"], "--scale 8,x: must be numbers of devices from 1 to 1000000"),
        (["--scale", "0"], "--scale 0: must be"),
        (["--scale", "8", "--constants", "abacus"], "--constants abacus: no such file"),
        (["--scale", "8", "--constants", "h100", "--backend", "gloo"], "--backend gloo: no constants of"),
        (
            ["--scale", "8", "--constants", "h100", "--devices-per-host", "0"],
            "--devices-per-host 0: must be at least 1",
        ),
        (["--scale", "8", "--constants", "p100", "training.precision=bf16"], "training.precision=bf16: constants of"),
        (["--scale", "8", "--constants", "h100", "-np", "8"], "-np: not with --scale"),
        (["--scale", "8", "--constants", "h100", "--output", "x.png"], "--output: not with --scale"),
        (["--constants", "h100"], "--constants: only with --scale"),
        (["--backend", "gloo"], "--backend: only with --scale"),
    ],
)
def test_wrong_input_is_one_line(words: list[str], told: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["hvd-transformer", "plan", *SMALL, "--vocab-size", f"{V}", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"hvd-transformer: {told}")


def test_layouts_have_work_for_each_replica() -> None:
    """As training demands: of texts, replicas share whole batches."""
    texts = ["task=classification", "data.source=rows.csv", "training.global_batch_size=64", "training.batch_size=16"]
    assert [_has_work(load(overrides=texts), dp) for dp in (4, 5)] == [True, False]
    columns = load(overrides=[*SMALL, "data.batching=columns", "training.global_batch_size=24"])
    assert {layout.dp for layout in layouts(work(), columns, H100, 8)} == {1, 2, 4}  # 24 of 6 columns
