"""What `hvd-transformer plan` says, against closed forms, torch's own optimizers and a real run of the layers."""

import math
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import accumulate
from operator import itemgetter
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from grad_sinks import Sink
from torch import nn
from torch._C._profiler import _EventType

from hvd_transformer.cli import main as cli
from hvd_transformer.cli.plan import plan as command
from hvd_transformer.config import load
from hvd_transformer.errors import UserError
from hvd_transformer.gradients.weight_grads import WeightGradStore
from hvd_transformer.models.language_model import LanguageModel, language_model_layers
from hvd_transformer.nn.contracts import MicroBatch
from hvd_transformer.nn.dropout import dropout_key
from hvd_transformer.nn.parallel_layers import WeightGradLayer
from hvd_transformer.parallel.pipeline import Losses, Pipeline, Stage
from hvd_transformer.parallel.pipeline_schedule import SCHEDULES
from hvd_transformer.planning.layer_profile import ParameterGrads, gradients_as_in_training
from hvd_transformer.planning.memory_plan import RECOMPUTES, MemoryPlan, StageCost, make_plan
from hvd_transformer.planning.model_costs import fake_model
from hvd_transformer.planning.pass_memory import PassMode, forward, run_pass
from hvd_transformer.planning.plan_text import plan_text
from hvd_transformer.tasks.registry import task_class

V, LAYERS, D, F, T = 97, 3, 24, 40, 10
NEITHER = PassMode(recompute=False, defer=False)
SMALL = [
    f"model.num_layers={LAYERS}", f"model.d_model={D}", "model.num_heads=4", f"model.d_feedforward={F}",
    "model.max_length=16", f"data.sequence_length={T}", "training.batch_size=6",
]  # fmt: skip


def small_plan(*words: str) -> MemoryPlan:
    return make_plan(load(overrides=[*SMALL, *words]), V)


# Weights of one block: qkv and output; the two of the feed-forward part; two norms. Each with its biases.
BLOCK = (3 * D * D + 3 * D) + (D * D + D) + (D * F + F) + (F * D + D) + 4 * D


@pytest.mark.parametrize(
    ("words", "embedding", "head"),
    [
        (["model.tie_embeddings=false", "model.norm=post"], V * D, V * D + V),
        (["model.tie_embeddings=true", "model.norm=pre"], 0, V * D + 2 * D),
        (["model.tie_embeddings=true", "model.norm=post", "model.position=learned"], 16 * D, V * D),
    ],
)
def test_parameters_of_each_layer(words: list[str], embedding: int, head: int) -> None:
    """A tied matrix counts once, with the output layer."""
    plan = small_plan(*words)
    assert [layer.parameters for layer in plan.layers] == [embedding, *[BLOCK] * LAYERS, head]
    model = LanguageModel(V, plan.config.model)
    assert plan.parameters == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("vocabulary", [False, True])
def test_ranks_that_share_matrices_plan_for_one_of_them(vocabulary: bool) -> None:
    """What stays whole: norms, and the biases of what is summed."""
    words = ["model.tie_embeddings=false", "model.norm=post", "parallel.tensor=2"]
    plan = small_plan(*words, f"parallel.vocab_parallel={vocabulary}")
    block = (3 * D * D + 3 * D) // 2 + (D * D // 2 + D) + (D * F + F) // 2 + (F * D // 2 + D) + 4 * D
    own = V // 2 if vocabulary else V
    assert [layer.parameters for layer in plan.layers] == [own * D, *[block] * LAYERS, own * D + own]
    whole = small_plan(*words[:2])
    assert plan.layers[1].forward_flops * 2 == whole.layers[1].forward_flops
    assert "2 ranks split the matrices" in plan_text(plan, 80)


def test_the_tutorials_model() -> None:
    plan = make_plan(load("tutorial-1b"))
    assert plan.parameters == 1_041_453_167
    assert (plan.vocab_size, plan.vocab_origin.partition(":")[0]) == (28_783, "assumed")
    assert (plan.micro_batch_size, plan.num_micro_batches) == (3, 7)  # 20 samples in at most 8 pieces
    assert [plan.memory(stage)[:3] for stage in plan.stages] == [
        [4 * stage.parameters, 4 * stage.parameters, 0] for stage in plan.stages
    ]


def test_flops_of_a_block_and_the_head() -> None:
    plan = small_plan("model.dropout=0")
    _, block, *_, head = plan.layers
    tokens = 6 * T
    products = 2 * tokens * (4 * D * D + 2 * D * F)
    attention = 2 * tokens * T * D  # of one of its two products, over all heads; the mask saves nothing here
    assert block.forward_flops == products + 2 * attention
    assert block.backward_flops == 2 * products + 5 * attention  # the fused kernel forms the scores again
    # Logits, and the gradients of what they come from: all in forward.
    assert (head.forward_flops, head.backward_flops) == (3 * 2 * tokens * V * D, 0)


def install_parameter_grads(model: LanguageModel, store: WeightGradStore) -> None:
    """Weight gradients are added to the parameters' own, as in training."""
    for module in model.modules():
        if isinstance(module, WeightGradLayer):
            module.weight_grads = ParameterGrads(module, store)


def really_kept(config, first: int, stop: int) -> int:
    """Bytes that layers first..stop - 1 of the real model on the CPU hold for their backward, with both ends."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64 if config.training.precision == "fp64" else torch.float32)
    try:
        model = LanguageModel(V, config.model).train()
    finally:
        torch.set_default_dtype(torch.float32)
    install_parameter_grads(model, WeightGradStore())
    mixed = torch.autocast("cpu", torch.bfloat16) if config.training.precision == "bf16" else nullcontext()
    size = -(-config.training.batch_size // config.parallel.micro_batches)
    tokens, targets = torch.randint(0, V, (size, T)), torch.randint(0, V, (size, T))
    tensors, ends, saved = (tokens,), [], []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    for number, layer in enumerate(language_model_layers(model)):
        kept = number in range(first, stop)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor) if kept else nullcontext()
        tensors += (targets,) if layer.name == "head" else ()
        if number == first:
            tensors = tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in tensors)
            ends += tensors
        with hooks, mixed, dropout_key(1, 2):
            result = layer.run(*tensors)
        tensors = (result,)
        if number == stop - 1:
            ends += tensors
    lasting = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    for module in model.modules():  # of positions
        table = getattr(module, "table", None)
        tables = () if table is None else table if isinstance(table, tuple) else (table,)
        lasting |= {tensor.untyped_storage().data_ptr() for tensor in tables}
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in [*saved, *ends]}
    return sum(num_bytes for pointer, num_bytes in storages.items() if pointer not in lasting)


@pytest.mark.parametrize(
    "words",
    [
        ["model.norm=pre", "model.activation=gelu"],
        ["model.norm=post", "model.activation=relu", "model.tie_embeddings=false"],
        ["model.dropout=0.2", "model.position=learned"],
        ["model.position=rotary", "parallel.micro_batches=2"],
        ["training.precision=bf16", "model.dropout=0.1", "model.position=rotary"],
        ["training.precision=fp64"],
    ],
)
def test_activations_are_those_of_a_real_run(words: list[str]) -> None:
    config = load(overrides=[*SMALL, *words])
    num_samples = -(-config.training.batch_size // config.parallel.micro_batches)
    with fake_model(config, V, num_samples) as (layers, batch, store, context):
        inputs, targets = batch.inputs, batch.targets
        first, outputs = run_pass(layers[:2], inputs, (), store, context, NEITHER)
        second, _ = run_pass(layers[2:], outputs, targets, store, context, NEITHER)
    assert first.kept == really_kept(config, 0, 2)
    assert second.kept == really_kept(config, 2, 5)


def test_activations_grow_with_the_micro_batches_in_flight() -> None:
    one, two, five = (
        small_plan(
            "parallel.pipeline=3", "parallel.partition=uniform", f"training.batch_size={2 * count}",
            f"parallel.micro_batches={count}",
        )
        for count in (1, 2, 5)
    )  # fmt: skip
    for number in range(3):
        single, pair, many = (plan.stages[number].activations for plan in (one, two, five))
        kept = pair["gpipe", "never"] - single["gpipe", "never"]
        assert many["gpipe", "never"] == single["gpipe", "never"] + 4 * kept
        assert many["1f1b", "never"] == single["1f1b", "never"] + (3 - number - 1) * kept


def test_a_recomputed_block_keeps_its_input_alone() -> None:
    words = ["parallel.pipeline=2", "parallel.partition=[3, 2]", "model.dropout=0"]
    many, one = (
        small_plan(*words, f"training.batch_size={count}", f"parallel.micro_batches={count}").stages[0].activations
        for count in (6, 1)
    )
    hidden = T * D * 4  # one sample, float32
    kept = T * 8 + 3 * hidden  # the token numbers, each block's input, the stage's output
    assert many["gpipe", "always"] == one["gpipe", "always"] + 5 * kept
    assert many["1f1b", "always"] == one["1f1b", "always"] + kept
    # At the first backward the last one is there as a whole.
    more = many["gpipe", "except_last"] - many["gpipe", "always"]
    assert more == (many["gpipe", "never"] - one["gpipe", "never"]) // 5 - kept


def really_allocated(run: Callable[[], object]) -> int:
    """The most bytes of tensors that torch's allocator had given out at once, beyond what it had before.

    What one operator takes and gives back itself does not count: a product of bfloat16 matrices may copy them to
    float32 and sum there, in buffers whose sizes depend on the instructions of the CPU.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    changes = []
    left = [(event, None) for event in profile.profiler.kineto_results.experimental_event_tree()]
    while left:
        event, operator = left.pop()
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            changes.append((event.start_time_ns, fields.ptr, fields.alloc_size, operator))
        elif operator is None and event.name.startswith("aten::"):
            operator = event
        left += [(child, operator) for child in event.children]
    taken, sizes = {}, []
    for _, address, num_bytes, operator in sorted(changes, key=itemgetter(0)):
        sizes.append(num_bytes)
        if num_bytes > 0:
            taken[address] = len(sizes) - 1, operator
        elif address in taken:
            place, taker = taken.pop(address)
            if operator is not None and operator is taker:
                sizes[place] = sizes[-1] = 0
    return max(accumulate(sizes))


@pytest.mark.parametrize(
    ("schedule", "recompute", "more"),
    [
        *((schedule, recompute, ["model.dropout=0.1"]) for schedule in SCHEDULES for recompute in RECOMPUTES),
        *(("1f1b", recompute, ["model.norm=post", "training.precision=bf16"]) for recompute in RECOMPUTES),
    ],
)
def test_the_pipelines_peak(schedule: str, recompute: str, more: list[str]) -> None:
    """What the real pipeline's tensors take from the allocator at most is the plan's."""
    words = [f"parallel.schedule={schedule}", f"parallel.recompute={recompute}", "parallel.micro_batches=4"]
    config = load("python-docs", overrides=[*words, *more, "model.loss_chunk=32", "model.num_layers=2"])
    planned = make_plan(config, V).stages[0].activations[schedule, recompute]
    model = LanguageModel(V, config.model).train()
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    model.embedding.embedding.embedding_grads = Sink(lambda tokens, rows: None)
    batches = [MicroBatch((torch.randint(0, V, (2, 128)),), (torch.randint(0, V, (2, 128)),)) for _ in range(4)]
    pipeline = Pipeline(
        [Stage(language_model_layers(model), torch.device("cpu"))],
        schedule=schedule, recompute=recompute, precision=config.training.precision,
    )  # fmt: skip
    install_parameter_grads(model, pipeline.stages[0].weight_grads)
    pipeline.forward_backward([batches[:1]], 1.0, Losses())  # makes the tables of positions
    measured = really_allocated(lambda: pipeline.forward_backward([batches], 1.0, Losses()))
    assert planned == pytest.approx(measured, rel=0.002)


def test_logits_are_a_gpus_unless_a_cpu_is_asked_for() -> None:
    """A micro-batch of 640 tokens: a GPU takes them at once, a CPU 256 at a time."""
    words = ["training.batch_size=64", "parallel.pipeline=2", "parallel.partition=[4, 1]"]
    gpu, cpu = (small_plan(*words, f"training.device={device}").stages[1] for device in ("auto", "cpu"))
    more = gpu.activations["1f1b", "never"] - cpu.activations["1f1b", "never"]
    # Logits and log-probabilities at once; a loop over chunks still holds one of the chunk before.
    assert more >= (2 * 640 - 3 * 256) * V * 4


@pytest.mark.parametrize(
    ("words", "make"),
    [
        (["optimizer.name=sgd"], lambda weights: torch.optim.SGD(weights, lr=0.1)),
        (["optimizer.name=sgd", "optimizer.momentum=0.9"], lambda weights: torch.optim.SGD(weights, 0.1, 0.9)),
        (["optimizer.name=adam"], torch.optim.Adam),
        (["optimizer.name=adamw"], torch.optim.AdamW),
    ],
)
def test_optimizer_state_is_torchs(words: list[str], make) -> None:
    plan = small_plan(*words, "parallel.pipeline=2")
    model = LanguageModel(V, plan.config.model)
    optimizer = make(model.parameters())
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    buffers = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.ndim > 0
    ]
    assert sum(stage.optimizer for stage in plan.stages) == sum(value.nbytes for value in buffers)
    assert sum(stage.gradients for stage in plan.stages) == sum(weight.grad.nbytes for weight in model.parameters())


@pytest.mark.parametrize(("stages", "count"), [(1, 3), (2, 1), (3, 5), (4, 16)])
def test_bubble_of_equal_stages(stages: int, count: int) -> None:
    config = load(overrides=[f"parallel.pipeline={stages}"])
    equal = [StageCost([], 0, 0, {}, forward_flops=7, backward_flops=14, deferred_flops=7)] * stages
    plan = MemoryPlan(config, 1, V, "", count, 1, count, [], equal)
    for schedule in ("gpipe", "1f1b"):
        assert plan.bubble(schedule) == pytest.approx((stages - 1) / (count + stages - 1))
    if count >= stages:  # Qi et al. 2023, section 3.1
        assert plan.bubble("zero_bubble") == pytest.approx((stages - 1) / (3 * count + stages - 1))
        assert plan.speed_up(schedule) == pytest.approx(stages * count / (count + stages - 1))


def test_auto_evens_out_the_flops() -> None:
    """Each block is as heavy as the next; the head of this vocabulary as about three of them."""
    words = [*SMALL, "parallel.pipeline=2", "model.num_layers=6", "parallel.partition=auto"]
    plan = make_plan(load(overrides=words), 600)
    costs = [layer.forward_flops + layer.backward_flops for layer in plan.layers]
    best = min(max(sum(costs[:cut]), sum(costs[cut:])) for cut in range(1, len(costs)))
    assert max(stage.forward_flops + stage.backward_flops for stage in plan.stages) == best
    assert max(sum(costs[:4]), sum(costs[4:])) > best  # the even cut is not the best one


def test_recompute_makes_backward_longer_by_the_blocks_forward() -> None:
    options = ["parallel.pipeline=2", "parallel.partition=[3, 2]", "parallel.micro_batches=3"]
    never, always = (small_plan(*options, f"parallel.recompute={kind}") for kind in ("never", "always"))
    forward = never.layers[1].forward_flops
    for number, blocks in enumerate((2, 1)):
        more = always.stages[number].backward_flops - never.stages[number].backward_flops
        assert more == blocks * forward > 0


@pytest.mark.parametrize(
    ("words", "given", "expected"),
    [
        (["data.vocab_size=300"], None, 300),
        (["data.vocab_size=300"], 500, 500),
        ([], None, 4096),  # the schema's default of byte pairs
        (["data.source=wikitext2", "data.tokenizer=basic_english"], None, 28_783),
    ],
)
def test_vocabulary(words: list[str], given: int | None, expected: int) -> None:
    assert make_plan(load(overrides=[*SMALL, *words]), given).vocab_size == expected


@pytest.mark.parametrize(
    "words",
    [
        ["data.source=input.txt", "data.tokenizer=char"],
        ["data.source=wikitext2", "data.tokenizer=basic_english", "data.min_frequency=2"],
        ["data.source=wikitext103", "data.tokenizer=basic_english"],
    ],
)
def test_a_vocabulary_that_only_the_data_knows(words: list[str]) -> None:
    with pytest.raises(UserError, match="--vocab-size"):
        make_plan(load(overrides=[*SMALL, *words]))


@pytest.mark.parametrize(("ranks", "tensor", "dp"), [(1, 1, 1), (4, 1, 4), (6, 2, 3)])
@pytest.mark.parametrize("optimizer", ["optimizer.name=sgd", "optimizer.name=adamw"])
def test_replicas_share_the_optimizer(optimizer: str, ranks: int, tensor: int, dp: int) -> None:
    words = [*SMALL, optimizer, f"parallel.tensor={tensor}", "communication.bucket_mb=0.001"]
    alone = make_plan(load(overrides=words), V).stages[0]
    state = make_plan(load(overrides=[*words, "parallel.optimizer_shard=state"]), V, ranks).stages[0]
    gradients = make_plan(load(overrides=[*words, "parallel.optimizer_shard=gradients"]), V, ranks).stages[0]
    for stage in (state, gradients):
        assert stage.weights == alone.weights
        assert stage.optimizer == math.ceil(alone.optimizer / dp)
    assert state.gradients == alone.gradients == alone.weights
    on_the_way = 0 if dp == 1 else alone.weights  # a small model's all at once
    assert gradients.gradients == math.ceil(alone.weights / dp) + on_the_way


@pytest.mark.parametrize(
    ("words", "ranks", "message"),
    [
        (["parallel.optimizer_shard=state"], None, "parallel.optimizer_shard=state: needs -np"),
        (["parallel.tensor=2"], 3, "-np 3: must be a multiple of parallel.tensor=2, at least 2"),
        ([], 0, "-np 0: must be a multiple of parallel.tensor=1, at least 1"),
    ],
)
def test_ranks_that_a_plan_needs(words: list[str], ranks: int | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_plan(load(overrides=[*SMALL, *words]), V, ranks)


def test_text_is_narrow_and_its_arithmetic_adds_up() -> None:
    plan = make_plan(load("tutorial-1b"))
    text = plan_text(plan, 80, 4.5)
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    sums = [line for line in text.splitlines() if " = " in line and line.startswith("stage ")]
    assert len(sums) == 2
    for line, stage in zip(sums, plan.stages, strict=True):
        parts, _, rest = line.partition(": ")[2].partition(" = ")
        total, _, answer = rest.partition(" of 4.50: ")
        assert sum(map(float, parts.split(" + "))) == pytest.approx(float(total))
        # Rounded up to hundredths of a GiB, each of the four.
        assert 0 <= float(total) * 2**30 - sum(plan.memory(stage)) <= 0.04 * 2**30
        assert answer == ("fits" if sum(plan.memory(stage)) <= 4.5 * 2**30 else "does not fit")
    assert {line.rpartition(": ")[2] for line in sums} == {"fits", "does not fit"}


def test_many_micro_batches_are_drawn_in_part() -> None:
    words = ["parallel.pipeline=2", "training.batch_size=40", "parallel.micro_batches=40"]
    assert "8 of its 40 micro-batches" in plan_text(small_plan(*words), 80)
    assert "of its" not in plan_text(small_plan(*words), 2000)


def test_command(tmp_path: Path) -> None:
    picture = tmp_path / "schedules.png"
    words = [*SMALL, "--vocab-size", "97", "--memory-gib", "1", "parallel.pipeline=2", "--output", str(picture)]
    done = CliRunner().invoke(command, words, catch_exceptions=False)
    assert done.exit_code == 0
    model = LanguageModel(97, load(overrides=SMALL).model)
    assert f"{sum(weight.numel() for weight in nn.ParameterList(model.parameters())):,}" in done.output.splitlines()[0]
    assert "fits" in done.output
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--preset", "nope"], "no such preset"),
        (["model.nope=1"], "unknown key"),
        (["--config", "/nonexistent.yaml"], "cannot be read"),
        (["--vocab-size", "1"], "at least 2"),
        (["--memory-gib", "0"], "above 0"),
        (["--memory-gib", "nan"], "above 0"),
        (["--output", "picture.pdf"], ".png"),
        (["--output", "/nonexistent/picture.png"], "cannot be written"),
        (["parallel.pipeline=6"], "at most 5"),
        (["parallel.pipeline=2", "parallel.partition=[1, 1]"], "the model has 5"),
        (["data.tokenizer=char"], "--vocab-size"),
    ],
)
def test_wrong_input_is_one_line(words: list[str], told: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["hvd-transformer", "plan", *SMALL, *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hvd-transformer: ")
    assert told in line


def test_help_imports_no_torch() -> None:
    script = (
        "import sys; from click.testing import CliRunner; from hvd_transformer.cli.main import group\n"
        "done = CliRunner().invoke(group, ['plan', '--help'])\n"
        "assert done.exit_code == 0 and '--memory-gib' in done.output, done.output\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("task", ["translation", "classification"])
def test_other_tasks_are_planned_as_they_run(task: str) -> None:
    """Every layer's bytes and weights, from fake tensors and from real ones."""
    config = load(overrides=[*SMALL, f"task={task}", "model.dropout=0.1", "data.vocab_size=300", "training.device=cpu"])
    plan = make_plan(config)
    model, layers, batch, _ = task_class(config).sketch(config, 300, plan.micro_batch_size)
    assert plan.parameters == sum(weight.numel() for weight in model.parameters())
    assert [layer.name for layer in plan.layers] == [layer.name for layer in layers]
    assert task_class(config).layer_names(config) == [layer.name for layer in layers]
    store, tensors = WeightGradStore(), batch.inputs
    with gradients_as_in_training(layers, store), dropout_key(0):
        forward(layers, batch.inputs, batch.targets, nullcontext, recompute=False)  # makes the tables of positions
        for layer, planned in zip(layers, plan.layers, strict=True):
            targets = batch.targets if layer is layers[-1] else ()
            found, tensors = run_pass([layer], tensors, targets, store, nullcontext, NEITHER)
            assert planned.activation_bytes == found.kept - found.inputs, layer.name
