"""A group whose prompt is in the row once, on weights that are in 4 bits or that two processes
share: loss and gradients of the same samples packed one behind another.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from hf_packfree import PackedSequence, apply_patches, token_log_probs
from hf_packfree.data import pack_prefixes
from tests.integrations.marks import needs
from tests.models.padded import all_gradients
from tests.models.test_head_loss_ranks import WRAPPED
from tests.ranks import two_ranks
from tests.support import (
    CONTROL,
    GRADIENT_TOL,
    LOGIT_TOL,
    checkpoint_layers,
    documents,
    gradients,
    relative_rms,
    tiny,
    worst_gradient,
)

ROWS = ["shared", "packed", "one document"]
"""What is shared once; without sharing; and, as the control, the first without its branches."""


def samples(depth: int, seed: int = 3) -> list[torch.Tensor]:
    """A prompt's answers, one of which goes on in two ways if `depth` is 2; 0 is for no prompt."""
    prompt, *answers = documents((40, 5, 64, 33, 30), seed=seed)
    group = [torch.cat([prompt[: 40 * bool(depth)], answer]) for answer in answers]
    more = documents((37, 9), seed=seed + 1)
    return group if depth < 2 else group[1:] + [torch.cat([group[2], turn]) for turn in more]


def step(model: Any, group: list[torch.Tensor], kind: str) -> dict[str, Any]:
    """Return samples' log-probabilities and entropies, and a loss of them, after its backward."""
    row, sizes = pack_prefixes(group), [len(one) for one in group]
    ids, record = row.input_ids, row.packed_sequence
    if kind == "packed":
        ids, record = torch.cat(group)[None], PackedSequence.from_lengths(sizes)
    elif kind == "one document":
        record = PackedSequence.from_lengths([record.num_tokens])
    output = model(input_ids=ids, packed_sequence=record, output_hidden_states=True)
    hidden, asked = output.hidden_states[-1], {"temperature": 0.7, "entropy": True}
    head = model.get_output_embeddings()
    if kind == "packed":
        ends = torch.tensor(sizes).cumsum(0) - 1
        targets = ids.roll(-1, 1).index_fill(1, ends, -100)
        found = token_log_probs(hidden, targets, head, **asked)
        values = torch.stack([found.log_probs, found.entropy], -1)[0].split(sizes)
        # a prediction stands where it is made here, and where the token is in a shared row
        parts = [torch.cat([one.new_zeros(1, 2), one[:-1]]) for one in values]
    else:
        found = row.log_probs(hidden, head, **asked)
        parts = row.of_samples(torch.stack([found.log_probs, found.entropy], -1))
    generator = torch.Generator().manual_seed(len(group))
    loss = sum((one * torch.randn(one.shape, generator=generator)).sum() for one in parts)
    loss.backward()
    return {"values": torch.cat(parts).detach(), "loss": loss.detach()}


def apart(found: dict[str, Any], wanted: dict[str, Any]) -> tuple[float, float]:
    """Return the error of values and loss, and the worst parameter's gradient's."""
    values = max(relative_rms(found[name], wanted[name]) for name in ("values", "loss"))
    return values, worst_gradient(found["grads"], wanted["grads"])


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    values, grads = apart(found, wanted)
    # measured: at most 5e-07 and 5e-06; the control 0.1 and 1.2
    assert values <= LOGIT_TOL and grads <= GRADIENT_TOL


def assert_apart(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    values, grads = apart(found, wanted)
    assert values >= CONTROL * LOGIT_TOL and grads >= CONTROL * GRADIENT_TOL


# PEFT's dependencies deprecate things
@pytest.mark.filterwarnings("default")
@needs("peft", "bitsandbytes")
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_qlora(checkpointing, tmp_path):
    """Adapters on every projection of bases in 4 bits, patched after."""
    from tests.integrations.test_peft import lora, quantised

    tiny().save_pretrained(tmp_path)
    ran, calls = {}, []
    for kind in ROWS:
        model = apply_patches(lora(quantised(tmp_path)))
        if checkpointing:
            base = model.get_base_model()
            checkpoint_layers(base, False)
        calls.clear()
        mlp = model.get_base_model().model.layers[0].mlp
        mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        ran[kind] = step(model, samples(2), kind) | {"grads": gradients(model)}
        assert len(calls) == 1 + checkpointing
        assert all("lora_" in name for name in ran[kind]["grads"])
    assert_same(ran["shared"], ran["packed"])
    assert_apart(ran["one document"], ran["packed"])


# PEFT's dependencies deprecate things
@pytest.mark.filterwarnings("default")
@needs("peft", "bitsandbytes")
@pytest.mark.parametrize("autocast", [False, True], ids=["bases alone", "autocast"])
def test_qlora_in_bfloat16(autocast, tmp_path):
    """As QLoRA is trained: bases multiply in bfloat16, under autocast all other products, too. Not
    farther from the same 4-bit bases in fp32 than samples are that are packed without sharing.
    """
    from tests.integrations.test_peft import lora, quantised

    tiny().save_pretrained(tmp_path)
    summed = {kind: torch.zeros(2) for kind in ROWS}
    # rounding is chance: one group's tree may be ahead by it, or behind
    for seed in (3, 4, 5):
        group = samples(2, seed=seed)
        model = apply_patches(lora(quantised(tmp_path)))
        wanted = step(model, group, "packed")["values"], gradients(model)
        for kind in ROWS:
            model = apply_patches(lora(quantised(tmp_path, computes_in=torch.bfloat16)))
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                values = step(model, group, kind)["values"]
            values = relative_rms(values, wanted[0])
            summed[kind] += torch.tensor([values, all_gradients(gradients(model), wanted[1])])
    shared, packed, one_document = (summed[kind] for kind in ROWS)
    # measured: .0123 and .350, packed .0123 and .355; under autocast .0143 and .273, .0143 and .274
    assert packed.gt(1e-3).all(), "nothing was rounded"
    assert shared.le(1.02 * packed).all(), (shared, packed)
    assert one_document[0] > 10 * shared[0] and one_document[1] > 4 * shared[1], "no control"


def of_rank(rank: int, way: str | None, kind: str, adapted: bool) -> dict[str, Any]:
    """A step on a rank's own samples, whose trees are of different depth; in a model that FSDP2
    shards, or in one of its own.
    """
    model = apply_patches(tiny())
    if adapted:
        from tests.integrations.test_peft import lora

        lora(model)
    wrapped = WRAPPED[way](model) if way else model
    found = step(wrapped, samples(2 * rank, seed=3 + rank), kind)
    grads = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if isinstance(grad, DTensor):
            grads[name] = grad.full_tensor()
        elif grad is not None:
            torch.distributed.all_reduce(grad)
            grads[name] = grad / 2
    return found | {"grads": grads}


FSDP2 = [("with the rest", False), ("with the norm", True)]
"""Where it keeps the head, and whether the model has adapters."""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What two ranks found, {(way, kind of row, adapted): each rank's}; way None: without FSDP2."""
    cases = [(way, kind, adapted) for way, adapted in FSDP2 for kind in ROWS]
    cases += [(None, "packed", adapted) for adapted in (False, True)]
    return dict(zip(cases, two_ranks(of_rank, cases, tmp_path_factory.mktemp("ranks"))))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("way", "adapted"), FSDP2, ids=[way for way, _ in FSDP2])
@needs("peft")
def test_fsdp2(ran, way, adapted, rank):
    """Ranks call FSDP2's collectives in step, however deep their trees are."""
    wanted = ran[way, "packed", adapted][rank]
    assert_same(ran[way, "shared", adapted][rank], wanted)
    assert_same(ran[way, "shared", adapted][rank], ran[None, "packed", adapted][rank])
    if rank:
        assert_apart(ran[way, "one document", adapted][rank], wanted)
