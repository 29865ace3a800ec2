"""The reference of fine-tuning: a plain loop of torch, and how far weights are from another."""

from collections.abc import Iterator

from torch import Tensor, nn, optim

SEED = 3
SETTINGS = [
    f"seed={SEED}", "training.precision=fp64", "training.device=cpu", "training.epochs=100", "training.log_every=1",
    "training.eval_every=100", "optimizer.lr_scaling=none", "optimizer.lr=0.005", "optimizer.schedule=constant",
    "optimizer.clip_norm=0.5", "optimizer.eps=1e-6", "optimizer.weight_decay=0.1", "data.workers=1",
]  # fmt: skip


def difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest of a weight. Not relative to it: a key's bias has no gradient but rounding."""
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).detach().abs().max()) for name in wanted)


def reference(
    model: nn.Module, steps: Iterator[list[tuple[Tensor, int]]], count: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and the last trained weights of a plain loop; a step's parts are (sum of losses, its targets)."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    free = [weight for weight in trained.values() if weight.dim() < 2 or id(weight) in embeddings]
    decayed = [weight for weight in trained.values() if all(weight is not other for other in free)]
    optimizer = optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": free, "weight_decay": 0.0}],
        lr=0.005, betas=(0.9, 0.95), eps=1e-6,
    )  # fmt: skip
    model.train()
    found = []
    for _, parts in zip(range(count), steps, strict=False):
        optimizer.zero_grad()
        loss = sum(part for part, _ in parts) / sum(targets for _, targets in parts)
        loss.backward()
        nn.utils.clip_grad_norm_(list(trained.values()), 0.5)
        optimizer.step()
        found.append(loss.item())
    return found, trained
