"""Random batches in every input format, alone and in pairs: exact, or refused by name, and
nothing between.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from hf_packfree.errors import PackFreeError
from tests import fuzz
from tests.support import GRADIENT_TOL, LOGIT_TOL, relative_rms, widen

IGNORED = fuzz.IGNORED
EXACT = 1e-10
"""In fp64, where rounding is 2^-29 of fp32's."""


def call(model, case, labels):
    arguments = dict(case.arguments)
    name, tokens = (
        ("inputs_embeds", model.get_input_embeddings()(case.ids))
        if case.embeds
        else ("input_ids", case.ids)
    )
    return model.train(case.train)(**{name: tokens}, **arguments, labels=labels, use_cache=False)


def check(case) -> str:
    """Run a case; return what became of it: exact, refused or upstream's."""
    said = fuzz.meaning(case)
    labels = fuzz.labels_of(case, said)
    wanted = fuzz.wanted(case, said, labels)
    model = fuzz.patched(case.family, case.attention, case.options)
    model.zero_grad(set_to_none=True)
    try:
        output = call(model, case, None if wanted.loss is None else labels)
    except PackFreeError as error:
        assert said.contradiction or said.doubtful or said.holes, f"refused without need: {error}"
        return "refused"
    assert not said.contradiction, "two formats contradict each other, and nothing was said"
    if said.holes:
        return check_upstreams(case, said, output)
    check_values(output, wanted)
    error = error_of_gradients(model, output, wanted, case.ids)
    if error > GRADIENT_TOL:
        # a router's gradient may cancel so far that rounding is more than this in fp32
        in_fp64 = error_in_fp64(case, said, labels)
        assert in_fp64 <= EXACT, f"gradients differ by {error:.1e}, and in fp64 by {in_fp64:.1e}"
    return "exact"


def error_in_fp64(case, said, labels) -> float:
    """The gradients' error where everything is computed in fp64, transformers' part too."""
    with pytest.MonkeyPatch.context() as patch:
        widen(patch)
        wanted = fuzz.wanted(case, said, labels, torch.float64)
        model = fuzz.patched(case.family, case.attention, case.options, torch.float64)
        model.zero_grad(set_to_none=True)
        output = call(model, case, None if wanted.loss is None else labels)
        return error_of_gradients(model, output, wanted, case.ids)


def check_upstreams(case, said, output) -> str:
    """A hole is upstream's alone, and only by a 0/1 mask."""
    mask = said.real.long()
    model = fuzz.unpatched(case.family, case.attention).train(case.train)
    with torch.no_grad():
        wanted = model(input_ids=case.ids, attention_mask=mask, use_cache=False).logits
    assert len(said.documents) == len(case.ids), "a packed batch has a hole"
    error = relative_rms(output.logits[said.real], wanted[said.real])
    assert error <= LOGIT_TOL, f"upstream's logits differ by {error:.1e}"
    return "upstream's"


def check_values(output, wanted):
    """Compare logits and loss."""
    found = [output.logits[row, part] for row, part, _ in wanted.documents]
    if found:
        error = relative_rms(
            torch.cat(found), torch.cat([logits for *_, logits in wanted.documents])
        )
        assert error <= LOGIT_TOL, f"logits differ by {error:.1e}"
    if wanted.loss is not None:
        assert abs(float(output.loss.detach()) - wanted.loss) <= 1e-5 * max(wanted.loss, 1), (
            "the loss differs"
        )


def error_of_gradients(model, output, wanted, ids) -> float:
    """The worst of all parameters'."""
    found = [output.logits[row, part] for row, part, _ in wanted.documents]
    objective = [] if wanted.loss is None else [output.loss]
    for part, (row, tokens, _) in zip(found, wanted.documents):
        objective += [(part * fuzz.weights_of(ids[row, tokens])).sum()] if wanted.read else []
    if not objective:
        return 0.0
    sum(objective).backward()
    grads = [
        torch.zeros_like(weight) if weight.grad is None else weight.grad
        for weight in model.parameters()
    ]
    return fuzz.gradient_error(grads, wanted.gradients)


def test_the_control_fails_unpatched(monkeypatch):
    monkeypatch.setattr(
        fuzz, "patched", lambda family, attention, options: fuzz.unpatched(family, attention)
    )
    numbers = torch.tensor([[0] * 7 + [1] * 12])
    ids = torch.cat((fuzz.tokens_of(7, 0), fuzz.tokens_of(12, 1)))[None]
    for name in ("positions", "blocks", "indexed", "dict of blocks"):
        case = fuzz.Case(
            ids,
            (name,),
            (fuzz.FORMATS[name](numbers),),
            "qwen3_5",
            "sdpa",
            (),
            True,
            False,
            False,
            True,
            numbers,
        )
        with pytest.raises(AssertionError, match="logits differ"):
            check(case)


@pytest.mark.parametrize("name", fuzz.FORMATS)
def test_a_default_device_changes_nothing(name):
    """What is planned on the host stays there where a script has moved torch's default device."""
    numbers = torch.tensor([[0] * 4 + [1] * 3 + [2] + [-1] * 2, [-1] * 2 + [0] * 8])
    given = {
        "input_ids": torch.arange(3, 23).view(2, 10),
        "use_cache": False,
        **fuzz.FORMATS[name](numbers).arguments,
    }
    model = fuzz.patched("qwen3_5", "sdpa", ()).train()

    def step():
        output = model(**given, labels=given["input_ids"])
        return torch.autograd.grad(output.loss, model.lm_head.weight)[
            0
        ], output.logits.detach().clone()

    wanted = step()
    with torch.device("meta"):
        found = step()
    assert all(torch.equal(one, other) for one, other in zip(found, wanted))


QUIET = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "database": None,
    # a failure says what it drew, and the line that draws it again
    "print_blob": True,
}


@pytest.mark.slow
@settings(max_examples=50, derandomize=True, **QUIET)
@given(case=fuzz.cases())
def test_every_format_alone_and_in_pairs_is_exact_or_refused(case):
    check(case)


@pytest.mark.fuzz
@settings(max_examples=2000, **QUIET)
@given(case=fuzz.cases())
def test_two_thousand_batches_are_exact_or_refused(case):
    check(case)
