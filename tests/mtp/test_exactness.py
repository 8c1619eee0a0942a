"""The head on a packed row against documents one after the other: loss, gradients, targets, and
what a document may see.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from hf_packfree import apply_patches
from hf_packfree.models.compat import CACHE
from hf_packfree.models.state import Kernels, PatchState
from hf_packfree.mtp import MTPOptions, depth_losses, head, training
from hf_packfree.mtp.attached import training_of
from hf_packfree.packing import PackedSequence
from tests.input_formats import additive
from tests.mtp.heads import (
    FAMILIES,
    LENGTHS,
    WEIGHT,
    build,
    labelled,
    loop_over_documents,
    of_head,
    packed,
    targets_of,
    worst_gradient,
)
from tests.support import checkpoint_layers, gradients, step


def in_loop(model, pairs, depth, detach):
    model.zero_grad(set_to_none=True)
    main, ahead = loop_over_documents(model, pairs, depth, detach)
    (main + ahead).backward()
    return main.detach(), ahead.detach(), gradients(model)


@pytest.mark.usefixtures("widened")
@pytest.mark.parametrize(
    ("family", "depth", "detach", "tie"),
    [
        *((family, depth, True, False) for family in FAMILIES for depth in (1, 3)),
        *((family, 2, False, False) for family in FAMILIES),
        ("qwen3_5", 2, False, True),
        ("qwen3_5", 1, True, True),
    ],
)
@pytest.mark.compat
def test_a_packed_row_is_its_documents(family, depth, detach, tie):
    model = build(family, hybrid=False, dtype=torch.float64, depth=depth, detach=detach, tie=tie)
    pairs = labelled()
    output, found = step(model, packed(pairs), num_items_in_batch=targets_of(pairs))
    facts = training_of(model).take()
    main, ahead, wanted = in_loop(model, pairs, depth, detach)
    assert abs(float(output.loss.detach() - main - ahead)) <= 1e-12
    assert worst_gradient(found, wanted) <= 1e-10
    each = [facts[f"packfree/mtp_loss_{k}"] for k in range(1, depth + 1)]
    counts = [
        sum(int((labels[k + 1 :] != -100).sum()) for _, labels in pairs)
        for k in range(1, depth + 1)
    ]
    summed = sum(one * count for one, count in zip(each, counts))
    assert WEIGHT / depth * summed / targets_of(pairs) == pytest.approx(float(ahead), rel=1e-10)


@pytest.mark.usefixtures("widened")
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_control_rolled_over_the_row_is_off(depth, monkeypatch):
    """The same head, whose targets and embeddings come from the next document at a document's
    end.
    """
    model = build(hybrid=False, dtype=torch.float64, depth=depth)
    pairs = labelled()
    right = float(in_loop(model, pairs, depth, True)[1])

    def over_the_row(row, packed, by, fill):
        return head_ahead(row, PackedSequence.from_lengths([packed.num_tokens]), by, fill)

    head_ahead = head.ahead
    for module in (head, depth_losses):
        monkeypatch.setattr(module, "ahead", over_the_row)
    monkeypatch.setattr(
        training,
        "row_targets",
        lambda shifted, packed, ignored: {
            "shift_labels": shifted,
            "num_items_in_batch": torch.tensor(targets_of(pairs)),
        },
    )
    step(model, packed(pairs))
    facts = training_of(model).take()
    counts = [int((packed(pairs)["labels"][:, k + 1 :] != -100).sum()) for k in range(1, depth + 1)]
    wrong = (
        WEIGHT
        / depth
        * sum(facts[f"packfree/mtp_loss_{k}"] * n for k, n in enumerate(counts, 1))
        / targets_of(pairs)
    )
    assert abs(wrong - right) > 0.01 * right


@pytest.mark.parametrize("family", FAMILIES)
def test_detached_leaves_every_other_gradient_bit_for_bit(family):
    pairs = labelled()
    model = build(family, depth=2)
    _, found = step(model, packed(pairs))
    plain = build(family, patched=False)
    plain.load_state_dict(
        {name: part for name, part in model.state_dict().items() if not name.startswith("mtp.")}
    )
    _, wanted = step(apply_patches(plain), packed(pairs))
    assert {name for name in found if not name.startswith("mtp.")} == wanted.keys()
    assert all(torch.equal(found[name], one) for name, one in wanted.items())
    assert all(float(found[name].norm()) > 0 for name in found if name.startswith("mtp."))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_behind_a_documents_end_changes_nothing(family):
    """Bit for bit: a document's states are the same whatever the next one holds."""
    model = build(family, depth=3)
    pairs = labelled()
    other = [*pairs[:4], *((ids.flip(0), labels.flip(0)) for ids, labels in pairs[4:])]
    seen = []
    model.mtp.register_forward_hook(lambda module, args, states: seen.append(torch.stack(states)))
    for one in (pairs, other):
        step(model, packed(one))
    first = sum(LENGTHS[:4])
    assert torch.equal(seen[0][:, :, :first], seen[1][:, :, :first]) and not torch.equal(
        seen[0], seen[1]
    )


@pytest.mark.parametrize("form", ["padded", "left padded", "padded, upstream", "alone"])
def test_every_form_of_a_batch(form):
    """Real tokens of padded batches, and rows of one document that upstream runs, give the
    loop's loss.
    """
    model, pairs = build(depth=2), labelled((37, 5, 64) if form != "alone" else (64,))
    longest = max(len(ids) for ids, _ in pairs)
    inputs = {"input_ids": torch.zeros(len(pairs), longest, dtype=torch.long)}
    inputs |= {
        "labels": torch.full_like(inputs["input_ids"], -100),
        "attention_mask": torch.zeros_like(inputs["input_ids"]),
    }
    for row, (ids, labels) in enumerate(pairs):
        place = slice(longest - len(ids), None) if form == "left padded" else slice(len(ids))
        for name, part in zip(
            ("input_ids", "labels", "attention_mask"), (ids, labels, torch.ones_like(ids))
        ):
            inputs[name][row, place] = part
    if form == "padded, upstream":
        for module in model.modules():
            if "packfree" in vars(module):
                vars(module)["packfree"] = replace(vars(module)["packfree"], padded="upstream")
    output, found = step(model, inputs)
    main, ahead, wanted = in_loop(model, pairs, 2, True)
    assert abs(float(output.loss.detach() - main - ahead)) <= 1e-5
    assert (
        worst_gradient(
            *({name: one for name, one in of.items() if "mtp" in name} for of in (found, wanted))
        )
        <= 1e-4
    )


CAUSAL = additive(torch.ones(1, 1, 37, 37, dtype=torch.bool).tril())
SQUARES = {
    "float": lambda mask: mask,
    "bool": lambda mask: mask == 0,
    "dict": lambda mask: {"full_attention": mask, "linear_attention": None},
}


@pytest.mark.parametrize("unpacked", ["upstream", "native"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("form", SQUARES)
def test_a_4d_mask_of_one_document_per_row(form, rows, unpacked):
    model, pairs = build(depth=2, patched=False), labelled((37,)) * rows
    apply_patches(
        model, unpacked=unpacked, mtp=MTPOptions(from_scratch=True, weight=WEIGHT, depth=2)
    )
    ids, labels = (torch.stack(parts) for parts in zip(*pairs))
    mask = SQUARES[form](CAUSAL.expand(rows, 1, 37, 37))
    output, found = step(model, {"input_ids": ids, "labels": labels, "attention_mask": mask})
    main, ahead, wanted = in_loop(model, pairs, 2, True)
    assert abs(float(output.loss.detach() - main - ahead)) <= 1e-5 and float(ahead) > 1
    assert worst_gradient(of_head(found), of_head(wanted)) <= 1e-4


MORE = {
    "a window": {"attention_mask": additive((CAUSAL == 0).triu(-9))},
    "a bias": {"attention_mask": CAUSAL - torch.arange(37).flip(0) / 37},
    "a cache": {},
}


@pytest.mark.parametrize("kind", MORE)
def test_what_the_head_cannot_follow_is_said_and_the_main_loss_is_upstreams(kind, caplog):
    ((ids, labels),) = labelled((37,))
    inputs = {"input_ids": ids[None], "labels": labels[None], **MORE[kind]}
    model, losses = build(patched=False), []
    for patch in (lambda: None, lambda: apply_patches(model, mtp=MTPOptions(from_scratch=True))):
        patch()
        cache = {CACHE: DynamicCache(config=model.config)} if kind == "a cache" else {}
        losses.append(model(**inputs, **cache).loss.item())
    assert losses[0] == losses[1] and training_of(model).take() == {}
    (record,) = caplog.records
    assert "with a cache, or a mask that is more than causal" in record.message


def test_the_label_of_every_target_is_in_the_same_document():
    """L - k - 1 targets of a document at depth k, none of those that are shorter."""
    model = build(depth=3)
    ids = torch.cat(documents_of := [ids for ids, _ in labelled()])[None]
    positions = torch.cat([torch.arange(len(one)) for one in documents_of])[None]
    model(input_ids=ids, labels=ids, position_ids=positions)
    counts = [int(row[1]) for row in training_of(model).totals]
    assert counts == [sum(max(length - k - 1, 0) for length in LENGTHS) for k in (1, 2, 3)]


def test_a_step_without_targets_gives_zero_gradients():
    model = build(depth=2)
    pairs = [(ids, torch.full_like(ids, -100)) for ids, _ in labelled((3, 2))]
    output, found = step(model, packed(pairs))
    assert float(output.loss.detach()) == 0.0
    assert len([name for name in found if name.startswith("mtp.")]) == 15
    assert all(float(found[name].abs().max()) == 0.0 for name in found if name.startswith("mtp."))


def test_nothing_but_padding_gives_zero_gradients():
    model, nothing = build(depth=2), torch.zeros(2, 6).long()
    output, found = step(
        model, {"input_ids": nothing, "attention_mask": nothing, "labels": nothing - 100}
    )
    assert (
        output.loss == 0
        and all(float(one.abs().max()) == 0 for one in found.values())
        and "mtp.fc.weight" in found
    )


class Largest(TorchDispatchMode):
    """Notes how many elements the largest tensor has that is made."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        made = (
            one
            for one in (out if isinstance(out, (tuple, list)) else [out])
            if isinstance(one, torch.Tensor)
        )
        self.size = max(self.size, *(one.numel() for one in made), 0)
        return out


@pytest.mark.parametrize("backend", ["torch", "upstream"])
def test_logits_of_the_whole_row_are_never_made(backend):
    tokens, words, width = 4096, 512, 8
    row, layer = (
        PackedSequence.from_lengths([3000, 1096]),
        torch.nn.Linear(width, words, bias=False),
    )
    states = [torch.randn(1, tokens, width, requires_grad=True) for _ in range(2)]
    targets, state = torch.randint(words, (1, tokens)), PatchState(elsewhere=Kernels(loss=backend))
    with Largest() as largest:
        sum(
            depth_losses.depth_losses(states, targets, row, layer, state, detach=True).sums
        ).backward()
    assert (largest.size <= tokens * words // 2) == (backend == "torch"), "the control makes them"
    assert states[1].grad is not None and layer.weight.grad is None


def test_accumulation_is_one_big_batch():
    model, pairs = build(depth=2), labelled()
    items = targets_of(pairs)
    _, whole = step(model, packed(pairs), num_items_in_batch=items)
    model.zero_grad(set_to_none=True)
    for part in (pairs[:3], pairs[3:]):
        model(**packed(part), num_items_in_batch=items).loss.backward()
    parts = {name: one for name, one in gradients(model).items() if name.startswith("mtp.")}
    assert worst_gradient(parts, {name: whole[name] for name in parts}) <= 1e-5


def test_gradient_checkpointing_changes_no_gradient():
    model, pairs = build(depth=2), labelled()
    _, wanted = step(model, packed(pairs))
    checkpoint_layers(model, False)
    assert model.mtp.layers[0].gradient_checkpointing
    _, found = step(model, packed(pairs))
    assert all(torch.equal(found[name], one) for name, one in wanted.items())


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_routers_are_balanced_over_tokens_with_a_target(family):
    """As over the tokens of each document that a loop over documents runs, and no others."""
    model, pairs, losses = build(family, depth=2), labelled(), {}
    model.router_aux_loss_coef = model.config.router_aux_loss_coef = 1.0
    for wanted in (False, True):
        losses[wanted] = model(**packed(pairs), output_router_logits=wanted)
    ours = losses[True].loss - losses[False].loss - losses[True].aux_loss
    gate, logits = model.mtp.layers[0].mlp.gate, []
    gate.register_forward_hook(lambda module, args, output: logits.append(output[0]))
    with torch.no_grad():
        loop_over_documents(model, pairs, 2)
    own = sys.modules[type(model).__module__].load_balancing_loss_func
    wanted = WEIGHT * own(tuple(logits), model.num_experts, model.num_experts_per_tok)
    assert len(logits) == sum(len(ids) > k + 1 for ids, _ in pairs for k in (1, 2))
    assert ours.item() == pytest.approx(wanted.item(), rel=1e-5) and wanted.item() > 0.1


def test_evaluation_has_the_main_loss_alone():
    model, pairs = build(), labelled()
    with torch.no_grad():
        training = model(**packed(pairs)).loss
    model.eval()
    # training sums in chunks
    assert model(**packed(pairs)).loss.item() == pytest.approx(training.item(), rel=1e-6)
    assert training_of(model).take() == {}
